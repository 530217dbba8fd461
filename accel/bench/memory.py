"""Peak GPU memory of a piece of work."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def release(device: torch.device) -> None:
    """Gives back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    """By torch's allocator, once what nothing uses is given back; 0 on a CPU."""
    release(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


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


def device_bytes(device: torch.device) -> int:
    """In use on the whole device, what is mapped beside torch's allocator too; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def device_peak(device: torch.device) -> Iterator[list[int]]:
    """Inside, the largest of what the device has in use, looked at every two milliseconds."""
    found, done = [device_bytes(device)], threading.Event()

    def look() -> None:
        while not done.is_set():
            found[0] = max(found[0], device_bytes(device))
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    if device.type == "cuda":
        thread.start()
    try:
        yield found
    finally:
        done.set()
        if device.type == "cuda":
            thread.join()
