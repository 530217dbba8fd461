"""Where choices that were measured on a GPU are remembered."""

import os
from pathlib import Path

import torch


def choices_file(kind: str) -> Path | None:
    """One file a kind, a GPU and a set of versions, below ACCEL_CACHE_DIR or ~/.cache/accel; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    folder = os.environ.get("ACCEL_CACHE_DIR") or Path.home() / ".cache" / "accel"
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return Path(folder) / (f"{kind}-" + "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json")
