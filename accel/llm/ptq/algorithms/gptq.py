"""GPTQ: columns rounded one by one, each one's error made good by those that are still to come.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from accel_kernels.gemm.quantized_weight import Quantized
from torch import Tensor

from accel.llm.ptq.calibration.layer_work import LayerWork
from accel.llm.ptq.calibration.linears import weight_matrix
from accel.quantization.rounding import Grid, grid, nearest, round_to_nearest
from accel.quantization.scheme import Scheme

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
COLUMNS = 128  # whose errors the columns behind them get in one product


class Hessian:
    """X_g^T X_g / tokens of every group g of columns of a linear's inputs X, a running mean.

    mean: (groups, columns, columns) in float32. group: how many columns one has; None for all of them.
    """

    def __init__(self, group: int | None = None) -> None:
        self.group = group
        self.mean: Tensor | None = None
        self.tokens = 0

    def __call__(self, rows: Tensor) -> None:
        """rows: (tokens, K)."""
        if not len(rows):
            return
        parts = rows.float().unflatten(1, (-1, self.group or rows.shape[1])).transpose(0, 1)
        self.tokens += len(rows)
        if self.mean is None:
            self.mean = parts.new_zeros(len(parts), parts.shape[2], parts.shape[2])
        self.mean.baddbmm_(parts.mT, parts, beta=1 - len(rows) / self.tokens, alpha=1 / self.tokens)


def quantize_layer(work: LayerWork) -> None:
    """All linears of a layer, those first that are called first: the later ones see the rounding of the earlier.

    A linear that was given no token of the calibration is rounded to nearest, with a note.
    """
    for stage in work.stages():
        hessian = Hessian()
        work.observe({stage[0]: hessian})
        if hessian.mean is not None:
            weights = [weight_matrix(work.linears[path]) for path in stage]
            for path, found in zip(stage, gptq(weights, hessian.mean[0], work.scheme), strict=True):
                work.keep(path, found)
    work.round_rest()


def gptq(weights: Sequence[Tensor], hessian: Tensor, scheme: Scheme) -> list[Quantized]:
    """Of weights (N, K) of a floating dtype that are given the same inputs. Scales' dtype as of `round_to_nearest`.

    hessian: (K, K) float32, see `Hessian`; written over, since nothing else takes as much memory. The scales of a group
    are taken when its turn comes, of what the errors before it have made of it. Raises ValueError for NaN or Inf in a
    weight, or for a K that does not fit the scheme.
    """
    dtypes = [round_to_nearest(weight, scheme).scales.dtype for weight in weights]  # which raises as well
    upper = _inverse_root(hessian)
    found: list[Quantized] = []
    for dtype, alike in groupby(zip(weights, dtypes, strict=True), key=itemgetter(1)):
        found += _rounded([weight for weight, _ in alike], upper, scheme, dtype)
    return found


def _rounded(weights: list[Tensor], upper: Tensor, scheme: Scheme, dtype: torch.dtype) -> list[Quantized]:
    """Rows do not know of each other, so all weights go together. By itself each, where a scale of one of them turns
    out too small for float16: then that one has scales in float32.
    """
    parts = _columns(torch.cat([weight.detach().float() for weight in weights]), upper, scheme, dtype)
    if parts is None and len(weights) > 1:
        return [found for weight in weights for found in _rounded([weight], upper, scheme, dtype)]
    if parts is None:
        return _rounded(weights, upper, scheme, torch.float32)
    whole, ends = Quantized(*parts, scheme.format), list(accumulate(map(len, weights)))
    return [whole.rows(end - len(weight), end).each(Tensor.clone) for weight, end in zip(weights, ends, strict=True)]


def _columns(
    rest: Tensor, upper: Tensor, scheme: Scheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """What a `Quantized` of rest (N, K) holds, which is written over; None where a scale is too small for float16."""
    rows, columns = rest.shape
    group = scheme.group or columns
    found: list[Grid] = []
    numbers = []
    for start in range(0, columns, COLUMNS):
        end = min(start + COLUMNS, columns)
        errors = rest.new_empty(rows, end - start)
        for column in range(start, end):
            if column % group == 0:
                # The errors of this block have not reached the columns behind it.
                now = rest[:, column : column + group].clone()
                if column + group > end:
                    now[:, end - column :] -= errors[:, : column - start] @ upper[start:column, end : column + group]
                if (made := grid(now, scheme, dtype)) is None:
                    return None
                found.append(made)
            scales, zeros = found[-1]
            number = nearest(rest[:, column], scales, zeros, scheme)
            value = number.float() if zeros is None else number.float() - zeros.float()
            error = (rest[:, column] - value * scales.float()) / upper[column, column]
            numbers.append(number)
            errors[:, column - start] = error
            rest[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
        rest[:, end:] -= errors @ upper[start:end, end:]
    scales = torch.stack([scales for scales, _ in found], dim=1)
    zeros_of = [zeros for _, zeros in found if zeros is not None]
    return scheme.format.pack(torch.stack(numbers, dim=1)), scales, torch.stack(zeros_of, dim=1) if zeros_of else None


def _inverse_root(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U = H^-1, H damped in its place as much as it needs to have an inverse.

    A column that never gets anything ("dead") stands by itself: it is rounded to nearest, and not set to zero, since
    other texts may reach it.
    """
    diagonal, damping = hessian.diagonal(), DAMPING
    dead = diagonal == 0
    mean = diagonal.sum() / (~dead).sum().clamp_min(1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    diagonal[dead] = mean
    while True:
        diagonal += damping * mean
        other, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            other = torch.cholesky_inverse(other)  # in its place: each is as large as the Hessian
            upper, failed = torch.linalg.cholesky_ex(other, upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        damping *= 10
