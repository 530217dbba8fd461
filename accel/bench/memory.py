"""Peak memory of a piece of work: of a GPU as it was, and on paper."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class _Attention(TorchFunctionMode):
    """Attention makes its result alone, as kernels do, and no scores, as torch's formula for other devices would."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            return torch.empty_like((*args, *(kwargs or {}).values())[0])
        return func(*args, **(kwargs or {}))


class LivingTensors(TorchDispatchMode):
    """Counts the bytes of what operations make inside that is not in the memory of what they are given, while it lives.

    counts: of which tensors. most: bytes at a time.
    """

    def __init__(self, counts: Callable[[torch.Tensor], bool] = lambda tensor: True) -> None:
        super().__init__()
        self.counts = counts
        self.sizes: dict[int, int] = {}  # by storage
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and _storage(one) not in given:
                self.count(one)
        return made

    def count(self, tensor: torch.Tensor) -> None:
        """As what operations make."""
        key, storage = _storage(tensor), tensor.untyped_storage()
        if key in self.sizes or not self.counts(tensor):
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_on_paper(run: Callable[[], object]) -> int:
    """Peak bytes of what a call makes, as torch runs it op by op, without values; what is fused makes less."""
    with torch.no_grad(), _Attention(), LivingTensors() as living:
        run()
    return living.most
