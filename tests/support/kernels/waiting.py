"""What would make the host wait for a GPU, or have no place in a CUDA graph, told on a CPU."""

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
