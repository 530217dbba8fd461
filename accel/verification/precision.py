"""A module in another precision than its own, without a change to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel.offload.call_hooks import streamed_model
from accel.patching.fast_forward import FastForward
from accel.patching.structure import twin

PLAIN = (torch.Tensor, nn.Parameter)  # weights of other types are packed: quantized, sharded
WHOLE = (torch.int64, torch.bool)  # of tensors that are no weights, where none are quantized
MOST_WEIGHTS = 2**27  # of a model that is held once more to see whether it may be fused


def finer(dtype: torch.dtype) -> torch.dtype:
    """The precision in which rounding in `dtype` shows: float64 for float32, float32 for the half precisions."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor cast to dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def upcast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A twin of the module with its weights in dtype, all else shared, that runs the stock forwards.

    The module is only read, so other threads may use it meanwhile. Raises ValueError, with the reason, where a twin
    would not compute the same: weights that are packed or not loaded, a forward that somebody replaced. So it does
    where it would be beside what a budget allows, of weights in two places.
    """
    if streamed_model(module) is not None:
        raise ValueError("its weights have a budget, which a copy of them is not in")
    for path, child in module.named_modules():
        where = path or type(module).__name__
        if not isinstance(vars(child).get("forward"), FastForward | None):
            raise ValueError(f"{where} has a replaced forward")
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and (tensor.is_meta or type(tensor) not in PLAIN):
                raise ValueError(f"the weights of {where} are not plain tensors on a device")
    return twin(module, lambda tensor: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor)


@contextmanager
def widened(forward: FastForward, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Inside, the module of this forward, in dtype, is a twin in float32, which is given. Nobody may call it meanwhile.

    Raises ValueError, with the reason, where there is none.
    """
    module = forward.module
    held = [*chain(module.parameters(), module.buffers())]
    if dtype.itemsize != 2 or forward.around is not None:
        raise ValueError("not in 16 bits, or called by way of another library")
    if any(one.dtype not in WHOLE and (not one.is_floating_point() or one.itemsize < 2) for one in held):
        raise ValueError("its weights are quantized")
    if sum(one.numel() for one in held) > MOST_WEIGHTS:
        raise ValueError(f"more than {MOST_WEIGHTS:,} weights")
    forward.module = upcast(module, torch.float32)
    try:
        yield forward.module
    finally:
        forward.module = module
