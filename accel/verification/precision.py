"""A module in another precision than its own, without a change to it."""

from typing import Any

import torch
from torch import nn

from accel.patching.fast_forward import FastForward

PLAIN = (torch.Tensor, nn.Parameter)  # weights of other types are packed: quantized, sharded


def finer(dtype: torch.dtype) -> torch.dtype:
    """The precision in which rounding in `dtype` shows: float64 for float32, float32 for the half precisions."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor cast to dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def upcast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A twin of the module with its weights in dtype, all else shared, that runs the stock forwards.

    The module is only read, so other threads may use it meanwhile. Raises ValueError, with the reason, where a twin
    would not compute the same: weights that are packed or not loaded, a forward that somebody replaced.
    """
    for path, child in module.named_modules():
        where = path or type(module).__name__
        if not isinstance(vars(child).get("forward"), FastForward | None):
            raise ValueError(f"{where} has a replaced forward")
        for tensor in (*child._parameters.values(), *child._buffers.values()):
            if tensor is not None and (tensor.is_meta or type(tensor) not in PLAIN):
                raise ValueError(f"the weights of {where} are not plain tensors on a device")
    return _twin(module, dtype, {})


def _twin(module: nn.Module, dtype: torch.dtype, made: dict[int, Any]) -> Any:
    """made: what has been copied already, by id, so that what is tied stays tied."""
    if id(module) not in made:
        twin = made[id(module)] = type(module).__new__(type(module))
        vars(twin).update(vars(module))
        vars(twin).pop("forward", None)
        for kind in ("_parameters", "_buffers"):
            tensors = vars(module)[kind].items()
            vars(twin)[kind] = {name: _cast(tensor, dtype, made) for name, tensor in tensors}
        children = module._modules.items()
        vars(twin)["_modules"] = {
            name: child if child is None else _twin(child, dtype, made) for name, child in children
        }
    return made[id(module)]


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype, made: dict[int, Any]) -> torch.Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    if id(tensor) not in made:
        cast = tensor.detach().to(dtype)
        made[id(tensor)] = nn.Parameter(cast, requires_grad=False) if isinstance(tensor, nn.Parameter) else cast
    return made[id(tensor)]
