"""Measuring in a fresh process, or as one of several."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Every cache that outlives a process and holds compiled kernels or choices made by measuring.
CACHES = ("ACCEL_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
GRACE_S = 60  # for a process that is told to end, and ends others first


def spawn(module: str, arguments: list[str], caches: Path | None, timeout: float | None = None) -> dict:
    """What the module prints as JSON when it is run in a fresh process with its kernel caches there, or as ever.

    Raises RuntimeError where it fails or takes more than `timeout` seconds.
    """
    environment = os.environ | ({} if caches is None else {name: str(caches / name.lower()) for name in CACHES})
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the same code, however this process found it
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as begun:
        try:
            printed, errors = begun.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{module} {' '.join(arguments)} took more than {timeout:.0f} s") from None
        finally:
            _end(begun)
    if begun.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{errors[-2000:]}")
    found: dict = json.loads(printed.strip().splitlines()[-1])
    return found


@contextmanager
def ranks(backend: str = "cpu:gloo,cuda:nccl", timeout: timedelta | None = None) -> Iterator[torch.device]:
    """Inside, this process is one of torchrun's, one a card, or of gloo on a CPU to try it out; gives its device.

    backend, timeout: of the group, on GPUs.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend if on_gpu else "gloo", timeout=timeout)
    yield device  # one that fails does not wait for the others
    dist.destroy_process_group()


def _end(process: subprocess.Popen[str]) -> None:
    """Where it still runs, tells it to end: torchrun then ends its ranks, which outlive it where it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
