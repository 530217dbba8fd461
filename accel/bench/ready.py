"""Time to ready, measured in a process of its own: seconds from `accel.optimize` through the first finished call.

Run as `python -m accel.bench.ready CASE DEVICE DTYPE VARIANT`; prints one line of JSON. `time_to_ready` starts it with
empty kernel caches (cold), then again with the caches it left (warm), and once for the first call of stock code.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import accel
from accel.bench.case import Case
from accel.bench.cases import CASES
from accel.bench.timing import seconds

# Every cache that outlives a process and holds compiled kernels or choices made by measuring.
CACHES = ("ACCEL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def measure_module(case: Case, device: torch.device, dtype: torch.dtype, variant: str) -> dict:
    """Seconds of the first call in this process, `accel.optimize` counted with it, and all that was lost on the way.

    lost_s: what `accel.optimize` and the first calls took beyond the same number of later calls; a graph captured in
    the second call is in it, for one.
    """
    module = case.build(device, dtype)
    inputs = case.inputs(device, dtype)

    def first() -> None:
        if variant == "accel":
            accel.optimize(module)
        case.call(module, inputs[0])

    def later() -> list[float]:
        return [seconds(partial(case.call, module, kwargs), device) for kwargs in inputs]

    with torch.no_grad():
        early = [seconds(first, device), *later()]
        late = later()
    lost_s = sum(early) - len(early) * statistics.median(late)
    return {"ready_s": round(early[0], 3), "lost_s": round(max(0.0, lost_s), 3)}


def spawn(module: str, arguments: list[str], caches: Path, timeout: float | None = None) -> dict:
    """What the module prints as JSON when it is run in a fresh process with its kernel caches there.

    Raises RuntimeError where it fails or takes more than `timeout` seconds.
    """
    environment = os.environ | {name: str(caches / name.lower()) for name in CACHES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same code, however this process found it
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} {' '.join(arguments)} took more than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def time_to_ready(case: Case, device: torch.device, dtype: torch.dtype, timeout: float | None = None) -> dict:
    """Cold and warm seconds until the first optimized call is done, and of stock's first call in a fresh process.

    Raises RuntimeError where one of the three processes fails or takes more than `timeout` seconds.
    """
    given = [case.name, str(device), str(dtype).removeprefix("torch.")]
    with tempfile.TemporaryDirectory(prefix="accel-ready-") as folder:
        cold, warm, stock = (
            spawn("accel.bench.ready", [*given, variant], Path(folder), timeout)
            for variant in ("accel", "accel", "stock")
        )
    return {
        "cold_s": cold["ready_s"],
        "warm_s": warm["ready_s"],
        "cold_lost_s": cold["lost_s"],
        "warm_lost_s": warm["lost_s"],
        "stock_first_call_s": stock["ready_s"],
    }


if __name__ == "__main__":
    name, device_name, dtype_name, variant_name = sys.argv[1:]
    print(json.dumps(measure_module(CASES[name], torch.device(device_name), getattr(torch, dtype_name), variant_name)))
