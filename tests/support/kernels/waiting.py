"""What makes the host wait for a GPU, as PyTorch tells, and what would, or has no place in a CUDA graph, on a CPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What hands numbers to the host, or gives sizes that only the device knows.
WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "masked_select",
    "bincount",
    "equal",
    "is_nonzero",
}


@contextmanager
def waits_noted(mode: str = "warn") -> Iterator[list[warnings.WarningMessage]]:
    """What is warned of inside: each wait is. mode: "error", and a wait raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.cuda.set_sync_debug_mode("default")


def texts_of(seen: list[warnings.WarningMessage]) -> list[str]:
    """Those of the waits among them."""
    return [text for one in seen if "synchroniz" in (text := str(one.message))]


class NothingWaits(TorchDispatchMode):
    """Inside, such an operation raises AssertionError. seen: the names of those that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.add(name)
        masked = name.startswith("index") and any(one is not None and one.dtype == torch.bool for one in _indices(args))
        assert name not in WAITING and not masked, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def _indices(args: tuple) -> list:
    return args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
