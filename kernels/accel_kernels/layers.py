"""Layers without state over these operations, whose forwards can be bound to modules of other classes.

Hugging Face's package `kernels` does: `register_kernel_mapping(kernel_mapping())`, then `use_kernels=True` or
`kernelize(model, mode=Mode.INFERENCE)`. Each class has a forward and nothing else; it reads the weight and eps of the
module that it is bound to. For inference: the operations have no backward.
"""

from dataclasses import dataclass

import torch
from torch import nn

from accel_kernels.elementwise.gated import gated
from accel_kernels.norm.rms_norm import Gate, rms_norm


class _Layer(nn.Module):
    """What `kernels` asks of each class."""

    can_torch_compile = False
    has_backward = False


class RMSNorm(_Layer):
    """x / rms(x) * weight over the last dimension; rounded once. hidden_states: (..., C); weight: (C,)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        y = rms_norm(hidden_states.contiguous(), self.weight, _eps(self))
        return y.to(torch.promote_types(y.dtype, self.weight.dtype))  # as weight * x is


class RMSNormZeroCentered(_Layer):
    """x / rms(x) * (1 + weight), as Gemma and Qwen3-Next store weights; otherwise as `RMSNorm`, in the dtype of x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.contiguous(), self.weight, _eps(self), offset=1.0)


class RMSNormGated(_Layer):
    """x / rms(x) * weight * silu(gate), in the dtype of x. hidden_states, gate: (..., C); weight: (C,)."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states.contiguous(), self.weight, _eps(self), gate=Gate(gate, "silu", False))


class SiluAndMul(_Layer):
    """silu(a) * b of the halves a and b of the last dimension. input: (..., 2 C). Returns (..., C)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return gated(*input.chunk(2, dim=-1), "silu")


def _eps(module: nn.Module) -> float:
    """Under either of the names that it has in transformers."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


LAYERS = {kind.__name__: kind for kind in (RMSNorm, RMSNormZeroCentered, RMSNormGated, SiluAndMul)}


@dataclass(frozen=True)
class Layer:
    """What a kernel mapping holds in the place of a repository: `load()` gives the class of this name in LAYERS."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        """The class. Raises KeyError for another name."""
        return LAYERS[self.layer_name]


def kernel_mapping(*names: str, device: str = "cuda") -> dict[str, dict[str, Layer]]:
    """What the package kernels registers as a mapping: these layers, or all, for modules on such a device."""
    return {name: {device: Layer(name)} for name in names or LAYERS}
