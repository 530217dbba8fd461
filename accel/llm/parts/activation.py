"""Activations, known by what they compute."""

import copy

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.fusion.norm_kind import stock_output
from accel.tolerances import ACTIVATION


def activation_name(module: nn.Module) -> str | None:
    """The name of the activation a module without weights computes, or None."""
    x = torch.linspace(-9, 9, 2001, dtype=torch.float64, device="cpu")
    probe = copy.copy(module)
    vars(probe)["training"] = False
    y = stock_output(probe, x)
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    close = (name for name, f in ACTIVATIONS.items() if float((f(x) - y).abs().max()) <= ACTIVATION)
    return next(close, None)
