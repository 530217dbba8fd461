"""Round to nearest: a weight to whole numbers with scales, a few rows at a time.

Symmetric: the largest absolute value of a row or group maps to the largest number. Asymmetric: the least and largest
value map to the least and largest number. The zero point is a whole number, so zeros stay zeros (Jacob et al.,
"Quantization and training of neural networks for efficient integer-arithmetic-only inference", 2018).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from accel_kernels.gemm.quantized_weight import Quantized

from accel.parallel.ranks import Ranks
from accel.quantization.scheme import Scheme

AT_ONCE = 2**22  # weights in work, in float32: the memory it takes besides the result
Grid = tuple[torch.Tensor, torch.Tensor | None]  # scales, and zeros if it has any
SCALES = (torch.float16, torch.bfloat16)  # dtypes that scales share with the weight; float32 for all others


def round_to_nearest(weight: torch.Tensor, scheme: Scheme, ranks: Ranks | None = None) -> Quantized:
    """weight: (N, K) of a floating dtype, in any strides. Every element is at most half a step of its scale away.

    ranks: among which columns are divided. A scale for all columns of a row is then that of the whole row.

    Of a stack (E, N, K) all rows, those of one matrix behind another's: (E N, K).
    Scales are in the dtype of a half-precision weight, float32 otherwise, or where one would be too small for float16.
    Raises ValueError for NaN or Inf, or for a K that does not fit the scheme.
    """
    if (reason := scheme.refuses(weight.shape[-1])) is not None:
        raise ValueError(reason)
    dtype = weight.dtype if weight.dtype in SCALES else torch.float32
    limits = None if ranks is None or scheme.group else _limits(weight, ranks)
    parts, checks = _all_rounded(weight, scheme, dtype, limits)
    if not checks.fit():
        parts, _ = _all_rounded(weight, scheme, torch.float32, limits)
    data, scales, zeros = zip(*parts, strict=True)
    joined = None if zeros[0] is None else torch.cat(zeros)
    return Quantized(torch.cat(data), torch.cat(scales), joined, scheme.format)


def _all_rounded(
    weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype, limits: torch.Tensor | None
) -> tuple[list[tuple], "GridChecks"]:
    checks = GridChecks([], [])
    return [_rounded(rows, scheme, dtype, checks, ends) for rows, ends in _with_limits(weight, limits)], checks


def sqnr_db(weight: torch.Tensor, quantized: Quantized) -> float:
    """Signal to quantization noise: 10 log10(sum w^2 / sum (w - w')^2); inf where nothing was rounded.

    weight: as of `round_to_nearest`.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=weight.device)  # read once, at the end: a GPU is not waited for
    start = 0
    for rows in _blocks(weight):
        end = start + len(rows)
        part = quantized.rows(start, end)
        exact = rows.double()
        sums[0] += exact.square().sum()
        sums[1] += (exact - part.dequantized(torch.float32).double()).square().sum()
        start = end
    signal, noise = sums.tolist()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf


def _blocks(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    for matrix in weight.detach() if weight.dim() == 3 else (weight.detach(),):
        yield from matrix.split(max(1, AT_ONCE // weight.shape[-1]))


def _limits(weight: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """(N, 2) float32: the least and the largest value of each row, of all its columns on all ranks."""
    least, largest = (find(weight.detach(), -1).float().flatten() for find in (torch.amin, torch.amax))
    found = torch.stack((-least, largest), 1)
    ranks.largest(found)
    found[:, 0].neg_()
    return found


def _with_limits(
    weight: torch.Tensor, limits: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    start = 0
    for rows in _blocks(weight):
        yield rows, None if limits is None else limits[start : start + len(rows)]
        start += len(rows)


def _rounded(
    rows: torch.Tensor, scheme: Scheme, dtype: torch.dtype, checks: "GridChecks", limits: torch.Tensor | None = None
) -> tuple:
    """Numbers, scales in dtype and zeros of some rows.

    limits: (rows, 2), values that a scale has to reach too.
    """
    groups = rows.float().unflatten(1, (-1, scheme.group or rows.shape[1]))
    bounded = groups if limits is None else torch.cat((groups, limits[:, None]), -1)
    scales, zeros = _grid(bounded, scheme, dtype, checks)
    numbers = nearest(groups, scales[..., None], None if zeros is None else zeros[..., None], scheme).flatten(1)
    return scheme.format.pack(numbers), scales, zeros


class GridChecks(NamedTuple):
    """What grids found of their groups, on the device: read once for many, so that the GPU is not waited for."""

    finite: list[torch.Tensor]
    fits: list[torch.Tensor]

    def fit(self) -> bool:
        """Whether no scale is too small for float16, if that is the dtype. Raises ValueError for NaN or Inf."""
        found = torch.stack([*self.finite, *self.fits]).tolist() if self.finite else []
        if not all(found[: len(self.finite)]):
            raise ValueError("NaN or Inf among the weights")
        return all(found[len(self.finite) :])


def grid(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid | None:
    """Scales in dtype and zeros of groups (..., columns) in float32; None where a scale is too small for float16."""
    checks = GridChecks([], [])
    found = _grid(groups, scheme, dtype, checks)
    return found if checks.fit() else None


def wide_grid(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> Grid:
    """As `grid`, with scales in float32 where one is too small for float16."""
    return grid(groups, scheme, dtype) or _grid(groups, scheme, torch.float32, GridChecks([], []))


def _grid(groups: torch.Tensor, scheme: Scheme, dtype: torch.dtype, checks: GridChecks) -> Grid:
    low, high = scheme.range
    least = groups.new_zeros(())
    if scheme.symmetric:
        span = groups.abs().amax(-1)
        exact = span / high
    else:
        least = groups.amin(-1).clamp_max(0)
        span = groups.amax(-1).clamp_min(0) - least
        exact = span / (high - low)
    scales = exact.to(dtype)
    if not scheme.symmetric:
        scales = _not_below(scales, exact)
    small = scales < torch.finfo(dtype).tiny  # where a scale has few digits, or none
    checks.finite.append(span.isfinite().all())
    if dtype == torch.float16:
        checks.fits.append((small & (span > 0)).logical_not().all())
    scales = scales.masked_fill(small, 1)  # of zeros, or of what float32 can hardly tell from them
    if scheme.symmetric:
        return scales, None
    return scales, (low - least / scales.float()).round().clamp(low, high).to(torch.int8)


def nearest(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """The numbers nearest to values in float32, int8 or float8; all of shapes that broadcast."""
    steps = values / scales.float()
    return scheme.format.nearest(steps if zeros is None else steps + zeros.float(), scheme.symmetric)


def _not_below(rounded: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The next larger number where a positive one was rounded down: least to largest must fit."""
    bits = rounded.view(torch.int16 if rounded.dtype in SCALES else torch.int32)
    return torch.where(rounded.float() < exact, bits + 1, bits).view(rounded.dtype)
