"""Measuring in a fresh process."""

import json
import os
import subprocess
import sys
from pathlib import Path

# Every cache that outlives a process and holds compiled kernels or choices made by measuring.
CACHES = ("ACCEL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def spawn(module: str, arguments: list[str], caches: Path | None, timeout: float | None = None) -> dict:
    """What the module prints as JSON when it is run in a fresh process with its kernel caches there, or as ever.

    Raises RuntimeError where it fails or takes more than `timeout` seconds.
    """
    environment = os.environ | ({} if caches is None else {name: str(caches / name.lower()) for name in CACHES})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same code, however this process found it
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} {' '.join(arguments)} took more than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    found: dict = json.loads(done.stdout.strip().splitlines()[-1])
    return found
