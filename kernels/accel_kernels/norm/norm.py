"""What a norm computes, as data: other operations take it as their first step."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Norm(NamedTuple):
    """y = h / sqrt(mean(h^2) + eps) * (weight + offset) + bias, over the last dimension; h = x, centered: x - mean(x).

    centered: LayerNorm (Ba et al. 2016); not centered: RMSNorm (Zhang and Sennrich 2019). offset: 1.0 where weights are
    stored less one, as Gemma does. Computed in fp32, rounded once.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    centered: bool = False
    offset: float = 0.0


class NormArguments(NamedTuple):
    """A norm as kernels take it, all of it in one argument."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0


def kernel_arguments(norm: Norm | None) -> tuple[NormArguments, str]:
    """A norm as kernels take it, and its kind, a constant of theirs: "none", "rms" or "layer"."""
    if norm is None:
        return NormArguments(), "none"
    return NormArguments(norm.weight, norm.bias, norm.eps, norm.offset), "layer" if norm.centered else "rms"


def norm_weights(norm: Norm | None) -> tuple[torch.Tensor | None, ...]:
    """Its weight and bias, as far as there is a norm."""
    return () if norm is None else (norm.weight, norm.bias)


def norm_reason(norm: Norm | None) -> str | None:
    """Why products do not take this norm as their first step."""
    bare = norm is not None and norm.bias is not None and not norm.centered
    return "a norm with a bias and no mean" if bare else None


def reference(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x: (..., C). Same shape and dtype; computed in fp32, in fp64 for fp64."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias = (None if t is None else t.to(kind) for t in (norm.weight, norm.bias))
    if norm.offset and weight is not None:
        weight = weight + norm.offset
    if norm.centered:
        return F.layer_norm(x.to(kind), x.shape[-1:], weight, bias, norm.eps).to(x.dtype)
    wide = x.to(kind)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)  # on a CPU faster than F.rms_norm
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
