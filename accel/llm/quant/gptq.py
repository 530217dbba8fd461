"""GPTQ: columns rounded one by one, each one's error made good by those that are still to come.

Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023.
"""

import torch
from accel_kernels.quantised import Quantised, pack
from torch import Tensor

from accel.llm.quant.layer_work import LayerWork
from accel.llm.quant.matrices import matrix
from accel.quant.rounding import SCALES, grid, nearest, quantise
from accel.quant.scheme import Scheme

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it
COLUMNS = 128  # whose errors the columns behind them get in one product


class Hessian:
    """X^T X / tokens of a linear's inputs X, (K, K) in float32, as a running mean."""

    def __init__(self):
        self.mean: Tensor | None = None
        self.tokens = 0

    def __call__(self, rows: Tensor) -> None:
        """rows: (tokens, K)."""
        if not len(rows):
            return
        rows = rows.float()
        self.tokens += len(rows)
        if self.mean is None:
            self.mean = rows.new_zeros(rows.shape[1], rows.shape[1])
        self.mean *= 1 - len(rows) / self.tokens
        self.mean.addmm_(rows.t(), rows, alpha=1 / self.tokens)


def quantise_layer(work: LayerWork, ordered: bool = False) -> None:
    """All linears of a layer, those first that are called first: the later ones see the rounding of the earlier.

    A linear that was given no token of the calibration is rounded to nearest, with a note.
    """
    for stage in work.stages():
        hessian = Hessian()
        work.observe({stage[0]: hessian})
        if hessian.mean is not None:
            for path in stage:
                work.keep(path, gptq(matrix(work.linears[path]), hessian.mean, work.scheme, ordered))
    work.round_rest()


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, ordered: bool = False) -> Quantised:
    """weight: (N, K) of a floating dtype. hessian: (K, K) float32, see `Hessian`. Scales' dtype as of `quantise`.

    ordered: columns of large inputs first ("activation order"), by the scales of the weight as it was; otherwise the
    scales of a group are taken when its turn comes, of what the errors before it have made of it.
    Raises ValueError for NaN or Inf in the weight, or for a K that does not fit the scheme.
    """
    by_nearest = quantise(weight, scheme)  # which raises as well
    dtype = weight.dtype if weight.dtype in SCALES else torch.float32
    found = _rounded(weight, hessian, scheme, ordered, dtype) if by_nearest.scales.dtype == dtype else None
    return found or _rounded(weight, hessian, scheme, ordered, torch.float32)


def _rounded(weight: Tensor, hessian: Tensor, scheme: Scheme, ordered: bool, dtype: torch.dtype) -> Quantised | None:
    """None where a scale is too small for float16."""
    rest, (rows, columns) = weight.detach().float().clone(), weight.shape
    group = scheme.group or columns
    order = hessian.diagonal().argsort(descending=True, stable=True) if ordered else None
    groups = [column // group for column in (order.tolist() if ordered else range(columns))]
    found = [grid(part, scheme, dtype) for part in rest.split(group, dim=1)] if ordered else []
    if any(part is None for part in found):
        return None
    if ordered:
        rest, hessian = rest[:, order], hessian[order][:, order]
    upper = _inverse_root(hessian)
    numbers = []
    for start in range(0, columns, COLUMNS):
        end = min(start + COLUMNS, columns)
        errors = rest.new_empty(rows, end - start)
        for column in range(start, end):
            if groups[column] == len(found):
                # The errors of this block have not reached the columns behind it.
                now = rest[:, column : column + group].clone()
                if column + group > end:
                    now[:, end - column :] -= errors[:, : column - start] @ upper[start:column, end : column + group]
                found.append(grid(now, scheme, dtype))
                if found[-1] is None:
                    return None
            scales, zeros = found[groups[column]]
            number = nearest(rest[:, column], scales, zeros, scheme)
            value = number.float() if zeros is None else number.float() - zeros.float()
            error = (rest[:, column] - value * scales.float()) / upper[column, column]
            numbers.append(number)
            errors[:, column - start] = error
            rest[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
        rest[:, end:] -= errors @ upper[start:end, end:]
    places = order.argsort().tolist() if ordered else range(columns)
    numbers = torch.stack([numbers[place] for place in places], dim=1)
    scales, zeros = zip(*found, strict=True)
    zeros = None if zeros[0] is None else torch.stack(zeros, dim=1)
    return Quantised(pack(numbers) if scheme.number == "int4" else numbers, torch.stack(scales, dim=1), zeros)


def _inverse_root(hessian: Tensor) -> Tensor:
    """The upper triangular U with U^T U = H^-1, H damped as much as it needs to have an inverse.

    A column that never gets anything ("dead") stands by itself: it is rounded to nearest, and not set to zero, since
    other texts may reach it.
    """
    hessian = hessian.clone()
    diagonal, damping = hessian.diagonal(), DAMPING
    dead = diagonal == 0
    mean = diagonal.sum() / (~dead).sum().clamp_min(1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    diagonal[dead] = mean
    while True:
        diagonal += damping * mean
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        damping *= 10
