"""Peak GPU memory of a piece of work."""

import gc
from collections.abc import Callable

import torch


def release(device: torch.device) -> None:
    """Gives back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def peak_mb(device: torch.device, first: Callable[[], object], steady: Callable[[], object]) -> dict | None:
    """MiB at the peak of `first` and `steady` together, and what the allocator holds on to while `steady` runs.

    A replayed CUDA graph allocates nothing, so its working memory only shows while it is captured, in `first`, and in
    what stays reserved. None on a CPU, where a process's peak says nothing about one model.
    """
    if device.type != "cuda":
        return None
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    first()
    steady()
    allocated = torch.cuda.max_memory_allocated(device)
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    steady()
    torch.cuda.synchronize(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return {"allocated": round(allocated / 2**20, 1), "reserved": round(reserved / 2**20, 1)}
