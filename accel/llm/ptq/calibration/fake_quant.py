"""Inputs of linears rounded to int8 and back while a model is calibrated in its own precision."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from accel_kernels.row_numbers import LEAST_PEAK, MOST
from torch import Tensor, nn

from accel.quantization.activations import KERNELS


def rounded_by_token(x: Tensor) -> Tensor:
    """x: (..., K), each row as its 8-bit numbers and scale stand for, in the dtype of x."""
    return KERNELS.rounded(x, "int8").dequantized(x.dtype)


def rounded_by_tensor(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """The same by one scale, (1,) float32; without one by that of the largest value in x."""
    if scale is None:
        scale = (x.float().abs().max() / MOST[torch.int8]).clamp_min(LEAST_PEAK).view(1)
    return KERNELS.rounded(x, "int8-static", fixed=scale).dequantized(x.dtype)


@contextmanager
def rounding_inputs(modules: Iterable[nn.Module], scales: Mapping[nn.Module, Tensor] | None = None) -> Iterator[None]:
    """Inside, these linears are called with their input rounded by token; where scales are given by tensor, by a
    linear's own where it has one among them.
    """

    def rounded(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        by: Callable[[Tensor], Tensor] = rounded_by_token
        if scales is not None:
            by = partial(rounded_by_tensor, scale=scales.get(module))
        return tuple(map(by, args)), {name: by(value) for name, value in kwargs.items()}

    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(rounded, with_kwargs=True).remove)
        yield
