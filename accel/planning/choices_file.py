"""Where choices that were measured on a GPU are remembered."""

from pathlib import Path

import torch
from accel_kernels.caches.cache_file import cache_folder


def choices_file(kind: str) -> Path | None:
    """One file a kind, a GPU and a set of versions, in `cache_folder()`; None without a GPU or a home."""
    folder = cache_folder()
    if folder is None or not torch.cuda.is_available():
        return None
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return folder / (f"{kind}-" + "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json")
