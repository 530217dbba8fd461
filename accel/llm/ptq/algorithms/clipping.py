"""Groups of weights with their largest cut off, where smaller steps for all the others are worth it.

Of AWQ (Lin et al. 2024). The error of a group's part of the output is computed from the second moments of its inputs.
"""

import torch
from accel_kernels.gemm.quantized_weight import Quantized
from torch import Tensor

from accel.quantization.rounding import SCALES, nearest, round_to_nearest, wide_grid
from accel.quantization.scheme import Scheme

STEPS, LEAST = 10, 0.5  # ratios of the largest weight tried, from 1 down to this one
AT_ONCE = 2**22  # weights in work


class BlockHessian:
    """X_g^T X_g / tokens for every group g of columns of a linear's inputs X: (groups, columns, columns) in float32."""

    def __init__(self, scheme: Scheme):
        self.scheme = scheme
        self.mean: Tensor | None = None
        self.tokens = 0

    def __call__(self, rows: Tensor) -> None:
        """rows: (tokens, K)."""
        if not len(rows):
            return
        parts = rows.float().unflatten(1, (-1, self.scheme.group or rows.shape[1])).transpose(0, 1)
        self.tokens += len(rows)
        if self.mean is None:
            self.mean = parts.new_zeros(len(parts), parts.shape[2], parts.shape[2])
        self.mean.baddbmm_(parts.mT, parts, beta=1 - len(rows) / self.tokens, alpha=1 / self.tokens)


def clipped(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Quantized:
    """weight: (N, K), each group of a row cut off at the ratio of its largest values that makes d^T H d least, d being
    what its numbers are off. hessian: see `BlockHessian`. Otherwise as `round_to_nearest`.
    """
    dtype = weight.dtype if weight.dtype in SCALES else torch.float32
    parts = []
    for rows in weight.detach().split(max(1, AT_ONCE // weight.shape[1])):
        groups = rows.float().unflatten(1, (-1, scheme.group or weight.shape[1]))
        best = _cut(groups, 1)
        least = _error(groups, best, hessian, scheme, dtype)
        for step in range(1, STEPS + 1):
            narrow = _cut(groups, 1 - step * (1 - LEAST) / STEPS)
            error = _error(groups, narrow, hessian, scheme, dtype)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better[..., None], narrow, best)
        parts.append(best.flatten(1).to(weight.dtype))
    return round_to_nearest(torch.cat(parts), scheme)


def _cut(groups: Tensor, ratio: float) -> Tensor:
    return groups.clamp(groups.amin(-1, keepdim=True) * ratio, groups.amax(-1, keepdim=True) * ratio)


def _error(groups: Tensor, narrow: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """(rows, groups)."""
    scales, zeros = wide_grid(narrow, scheme, dtype)
    zeros = None if zeros is None else zeros[..., None]
    numbers = nearest(narrow, scales[..., None], zeros, scheme).float()
    values = (numbers if zeros is None else numbers - zeros.float()) * scales.float()[..., None]
    off = (groups - values).transpose(0, 1)
    return ((off @ hessian) * off).sum(-1).t()
