"""What an adapter of low rank adds to a product in passes of its own, where no kernel takes it with the product."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.gemm.adapters.low_rank_term import by_row
from accel_kernels.gemm.fused_linear import fused_linear


class LowRank(NamedTuple):
    """An adapter of a linear (N, K). down: (R, K), A; up: (N, R), B; scale: by which what it adds is multiplied.

    Both are in the dtype of x, or in float32, as peft loads them; x is then cast before. rows: see `by_row`.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    rows: torch.Tensor | None = None


def add_low_rank(x: torch.Tensor, y: torch.Tensor, one: LowRank) -> torch.Tensor:
    """y + scale * (x A^T) B^T, of y's dtype (Hu et al., "LoRA", 2021). x: (..., K) of the adapter's dtype; y: (..., N).

    On a CPU x A^T, its product with B, that times the scale, and the sum are rounded to the dtype of the adapter, as
    peft does; on a GPU the last three at once. One row is multiplied by kernels that start early.
    """
    if not x.is_cuda:
        return (y + F.linear(by_row(F.linear(x, one.down), one.rows), one.up) * one.scale).to(y.dtype)
    if x.numel() == x.shape[-1] and x.dtype == y.dtype and y.is_contiguous() and one.down.shape[0] % 8 == 0:
        return fused_linear(by_row(fused_linear(x, one.down), one.rows), one.up, residual=y, scale=one.scale)
    inner = by_row(F.linear(x, one.down), one.rows).flatten(0, -2)
    rows = y.reshape(inner.shape[0], -1).to(inner.dtype)
    return torch.addmm(rows, inner, one.up.t(), alpha=one.scale).view(y.shape).to(y.dtype)
