"""The rows that products of one input share: normed once, rounded to 8 bits once."""

import torch
from accel_kernels import Norm, QuantizedRows
from accel_kernels.gemm.fused_linear import apply_norm

from accel.quantization.module import QuantizedLinear


class Rows:
    """norm(x) for all that multiply it; x: (..., K). Rounded rows take the norm in before anything is rounded."""

    __slots__ = ("_normed", "_rounded", "norm", "x")

    def __init__(self, x: torch.Tensor, norm: Norm | None = None):
        self.x, self.norm = x, norm
        self._normed: torch.Tensor | None = None
        self._rounded: dict[tuple, QuantizedRows] = {}

    def normed(self) -> torch.Tensor:
        if self.norm is None:
            return self.x
        if self._normed is None:
            self._normed = apply_norm(self.x, self.norm)
        return self._normed

    def rounded(self, linear: QuantizedLinear, activations: str) -> QuantizedRows:
        """As this linear, which rounds them so, has them; once for all that have them alike."""
        key = linear.rounding
        if key not in self._rounded:
            self._rounded[key] = linear.products.rounded(self.x, activations, self.norm, linear.fixed)
        return self._rounded[key]
