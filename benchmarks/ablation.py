"""What each mechanism gives, in milliseconds, on the registry's cases.

python benchmarks/ablation.py sd15 sdxl vae1024 [--out FOLDER]
"""

import argparse
import json
from pathlib import Path

import torch

from accel.bench.ablation import ablate
from accel.bench.cases import CASES
from accel.bench.machine import commit, machine, now, slug


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    device = torch.device(given.device)
    for name in given.cases:
        case = CASES[name]
        dtype = (case.dtype or torch.float16) if device.type == "cuda" else torch.float32
        module = case.build(device, dtype)
        inputs = case.inputs(device, dtype)
        calls = iter(range(10**9))

        def call(case=case, module=module, inputs=inputs, calls=calls):
            return case.call(module, inputs[next(calls) % len(inputs)])

        rows = []
        for row in ablate(module, call):
            rows.append(row)
            gain = "" if row["gain_ms"] is None else f"{row['gain_ms']:+8.3f}"
            print(f"{name:10s} {row['ms']:9.3f} ms {gain:8s} {row['without']}", flush=True)
        result = {"case": name, "about": case.about, "date": now(), "commit": commit(), "machine": machine(device)}
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{slug(device)}-{name}-ablation.json"
        path.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
        del module, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
