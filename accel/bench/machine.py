"""Which machine and which code a figure belongs to. Reads package versions without importing the packages."""

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

from accel.libraries.versions import installed

PACKAGES = ("torch", "triton", "transformers", "diffusers")


def _output(command: list[str], folder: Path | None = None) -> str | None:
    """First line a command prints, or None where it does not exist or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0].strip() or None


def machine(device: torch.device) -> dict:
    """The device, the driver and the versions of everything that decides speed."""
    on_gpu = device.type == "cuda"
    facts = {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if on_gpu else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return facts | {package: installed(package) for package in PACKAGES}


def slug(device: torch.device) -> str:
    """The device's name for a file name: `nvidia-h200`, or `cpu`."""
    if device.type != "cuda":
        return device.type
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def commit() -> str | None:
    """The commit of this code, `-dirty` behind it if tracked files differ; ACCEL_COMMIT outside a checkout."""
    root = Path(__file__).parents[2]
    # Installed, the package may lie inside somebody else's repository.
    head = _output(["git", "rev-parse", "HEAD"], root) if (root / ".git").exists() else None
    if head is None:
        return os.environ.get("ACCEL_COMMIT")
    return head + ("-dirty" if _output(["git", "status", "--porcelain", "--untracked-files=no"], root) else "")


def provenance(device: torch.device, dtype: torch.dtype) -> dict:
    """What every result says of where it comes from."""
    facts = {"date": now(), "commit": commit(), "machine": machine(device)}
    return facts | {"dtype": str(dtype).removeprefix("torch.")}


def now() -> str:
    """The time in UTC, as ISO 8601 has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
