"""One row times a matrix on one thread of a CPU: bf16, int8 by torch's own product, and int8 written out before.

python benchmarks/rows_on_a_cpu.py OUT.json: microseconds, the median of calls in turns; 1024 inputs, 2048 outputs.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accel_kernels import quantized_linear

from accel.bench.machine import commit, machine, now
from accel.quantization.rounding import round_to_nearest
from accel.quantization.scheme import Scheme

INPUTS, OUTPUTS, CALLS = 1024, 2048, 300


@torch.no_grad()
def main(path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, weight = torch.randn(1, INPUTS).bfloat16(), (torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5).bfloat16()
    held = round_to_nearest(weight, Scheme.parse("int8"))
    ways = {
        "bf16": lambda: F.linear(x, weight),
        "int8": lambda: quantized_linear(x, held),
        "int8, written out": lambda: F.linear(x, held.dequantized(torch.bfloat16)),
    }
    wanted = x.double() @ held.dequantized(torch.float64).t()
    for name, way in ways.items():
        off = float((way().double() - wanted).norm() / wanted.norm())
        if name != "bf16" and off > 0.01:
            raise AssertionError(f"{name} is off by {off:.1%}")
    taken = {name: [] for name in ways}
    for _ in range(CALLS):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(1e6 * (time.perf_counter() - start))
    us = {name: round(statistics.median(times), 1) for name, times in taken.items()}
    result = {"case": "rows-on-a-cpu", "inputs": INPUTS, "outputs": OUTPUTS, "date": now(), "commit": commit()}
    path.write_text(json.dumps(result | {"machine": machine(torch.device("cpu")), "us": us}, indent=1) + "\n")
    print(us)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
