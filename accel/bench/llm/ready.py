"""Time to ready of generate(), in a process of its own: what the first call takes beyond a later one.

Run as `python -m accel.bench.llm.ready MODEL DEVICE DTYPE VARIANT TOKENS`; prints one line of JSON.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import accel
from accel.bench.llm.interleaved import Variant
from accel.bench.llm.models import build, prompt
from accel.bench.ready import spawn
from accel.bench.timing import Clock, seconds

NEW, LATER = 16, 3


@torch.no_grad()
def measure_generation(name: str, device: torch.device, dtype: torch.dtype, variant: str, tokens: int) -> dict:
    """ready_s: `accel.optimize` and the first generate() beyond a steady one; optimize_s of it is the first part."""
    model = build(name, device, dtype)
    inputs = prompt(model, 1, tokens)
    optimize_s = seconds(lambda: accel.optimize(model), device) if variant == "accel" else 0.0
    first, *later = (seconds(lambda: Variant(variant, model).generate(inputs, NEW), device) for _ in range(1 + LATER))
    steady = statistics.median(later)
    return {
        "ready_s": round(max(0.0, optimize_s + first - steady), 3),
        "optimize_s": round(optimize_s, 3),
        "first_call_s": round(first, 3),
        "steady_call_s": round(steady, 4),
    }


def rows(name: str, device: torch.device, dtype: torch.dtype, tokens: int, clock: Clock) -> dict[str, dict]:
    """Of accel with empty kernel caches (cold) and with those it left (warm), and of stock. Raises RuntimeError."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        for state, variant in (("cold", "accel"), ("warm", "accel"), ("stock", "stock")):
            arguments = [name, str(device), str(dtype).removeprefix("torch."), variant, str(tokens)]
            found[state] = spawn("accel.bench.llm.ready", arguments, Path(folder), timeout=max(10.0, clock.left()))
    return found


if __name__ == "__main__":
    model_name, device_name, dtype_name, variant_name, length = sys.argv[1:]
    given = (torch.device(device_name), getattr(torch, dtype_name), variant_name, int(length))
    print(json.dumps(measure_generation(model_name, *given)))
