"""Activations rounded to int8 and back, token by token: what products of int8 numbers would give, without them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

HIGH = 127


def rounded_by_token(x: Tensor) -> Tensor:
    """x: (..., K), each row to the nearest of 255 numbers of its own scale, max |x| / 127, symmetric about zero.

    Same dtype; computed in float32.
    """
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / HIGH).clamp_min(torch.finfo(torch.float32).tiny)
    return ((wide / scales).round().clamp(-HIGH, HIGH) * scales).to(x.dtype)


@contextmanager
def rounding_inputs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these linears are called with their input rounded by token."""

    def rounded(module, args, kwargs):
        return tuple(map(rounded_by_token, args)), {name: rounded_by_token(value) for name, value in kwargs.items()}

    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(rounded, with_kwargs=True).remove)
        yield
