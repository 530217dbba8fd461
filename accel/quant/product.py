"""Products with a linear's weight, plain or quantised, for forwards that do its work without calling it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from accel_kernels import Quantised, dequantise, quantised_projection
from accel_kernels.projection import MOST_ROWS
from torch import nn

from accel.quant.module import QuantisedLinear
from accel.structure import plain, tampered


def plain_linear(module: nn.Module | None) -> str | None:
    """None where the module multiplies by its weight and does nothing else, else the reason; see `plain`."""
    return tampered(module) if type(module) is QuantisedLinear else plain(module, nn.Linear)


def placed(linear: nn.Linear) -> tuple[torch.device, torch.dtype]:
    """Where its weight is, and in what dtype it is multiplied."""
    if type(linear) is QuantisedLinear:
        return linear.data.device, linear.dtype
    return linear.weight.device, linear.weight.dtype


def matrix(linear: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The weight (N, K); a quantised one written out in dtype, for this one use."""
    return dequantise(linear.quantised, dtype) if type(linear) is QuantisedLinear else linear.weight


def product(linear: nn.Linear, x: torch.Tensor, bias: bool = True, multiply: Callable = F.linear) -> torch.Tensor:
    """x W^T, with bias where there is one. x: (..., K). multiply: what multiplies by a plain weight, as F.linear."""
    weight = linear.quantised if type(linear) is QuantisedLinear else linear.weight
    return multiplied(x, weight, linear.bias if bias else None, multiply)


def multiplied(
    x: torch.Tensor, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, multiply: Callable = F.linear
) -> torch.Tensor:
    """x W^T + b. A quantised weight is read as it lies where rows are few, and written out before them where not."""
    if not isinstance(weight, Quantised):
        return multiply(x, weight, bias)
    if x.numel() <= MOST_ROWS * x.shape[-1]:
        return quantised_projection(x.contiguous(), weight, bias)
    return multiply(x, dequantise(weight, x.dtype), bias)
