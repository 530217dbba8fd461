"""What a GPU does to float32, on a CPU."""

from collections.abc import Callable

import torch


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Float32 rounded to TF32, which keeps 10 bits of the mantissa."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32).view(x.shape)


def in_tf32(function: Callable) -> Callable:
    """The function of an input, a weight and more, with both rounded to TF32."""

    def rounded(x, weight, *args, **kwargs):
        return function(tf32(x), tf32(weight), *args, **kwargs)

    return rounded


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of a difference, by that of what is wanted."""
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())
