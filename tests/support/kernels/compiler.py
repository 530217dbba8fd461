"""Scripts that compile kernels: Triton's interpreter, which these tests run in, stays out of them."""

import os
import subprocess
import sys
from pathlib import Path


def in_a_process(script: str, cache: Path, *arguments: str, first: Path | None = None) -> str:
    """What the script prints; it can import accel_kernels and support. Nothing is compiled before it runs.

    first: a folder with packages to be taken before those that are installed.
    """
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join((*([str(first)] if first else []), "kernels", "tests")),
        "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1",
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
