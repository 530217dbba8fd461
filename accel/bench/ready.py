"""Time to ready, measured in a process of its own: seconds from `accel.optimize` through the first finished call.

Run as `python -m accel.bench.ready CASE DEVICE DTYPE VARIANT`; prints one line of JSON. `time_to_ready` starts it with
empty kernel caches (cold), then again with the caches it left (warm), and once for the first call of stock code.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import accel
from accel.bench.cases import CASES, Case
from accel.bench.timing import seconds

# Every cache that outlives a process and holds compiled kernels or choices made by measuring.
CACHES = ("ACCEL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def measure(case: Case, device: torch.device, dtype: torch.dtype, variant: str) -> dict:
    """First and later seconds of a call in this process, `accel.optimize` counted with the first."""
    module = case.build(device, dtype)
    inputs = case.inputs(device, dtype)

    def first():
        if variant == "accel":
            accel.optimize(module)
        case.call(module, inputs[0])

    with torch.no_grad():
        ready_s = seconds(first, device)
        steady_s = min(seconds(lambda kwargs=kwargs: case.call(module, kwargs), device) for kwargs in inputs[1:])
    return {"ready_s": round(ready_s, 3), "steady_s": round(steady_s, 5)}


def _spawn(case: Case, device: torch.device, dtype: torch.dtype, variant: str, caches: Path) -> dict:
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "accel.bench.ready", case.name, str(device), name, variant]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the time to ready of {case.name} ({variant}) failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def time_to_ready(case: Case, device: torch.device, dtype: torch.dtype) -> dict:
    """Cold and warm seconds until the first optimised call is done, and of stock's first call in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        caches = Path(folder)
        cold = _spawn(case, device, dtype, "accel", caches)
        warm = _spawn(case, device, dtype, "accel", caches)
        stock = _spawn(case, device, dtype, "stock", caches)
    return {"cold_s": cold["ready_s"], "warm_s": warm["ready_s"], "stock_first_call_s": stock["ready_s"]}


if __name__ == "__main__":
    name, device_name, dtype_name, variant_name = sys.argv[1:]
    print(json.dumps(measure(CASES[name], torch.device(device_name), getattr(torch, dtype_name), variant_name)))
