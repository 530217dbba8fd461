"""Rounding a row to 8 bits: its largest absolute value, the scale that this gives, and the nearest numbers.

Used by `quantize_rows` and by row programs; `row_numbers_triton` has the same functions for kernels.
"""

import torch

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = {torch.int8: -128.0, torch.float8_e4m3fn: -448.0}
# A row's scale is its largest absolute value over half the range of the numbers, as in the package compressed-tensors
# 0.20 (calculate_qparams). Its files say "dynamic" and name no formula.
REACH = {kind: (MOST[kind] - LEAST[kind]) / 2 for kind in MOST}
LEAST_PEAK = 1e-30  # a row of less is rounded as if this were in it; its scale stays a normal number


def row_peak(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row, (..., 1), infinite where one is NaN; x: (..., K) float32 or float64."""
    return x.abs().masked_fill(x.isnan(), torch.inf).amax(-1, keepdim=True).clamp_min(LEAST_PEAK)


def row_scale(peak: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value of one step; NaN for a row with anything not finite. dtype: of the numbers."""
    reach = torch.full_like(peak, REACH[dtype])  # of a plain number torch takes the reciprocal, which rounds once more
    return (peak / reach).masked_fill(peak.isinf(), torch.nan)


def row_numbers(x: torch.Tensor, peak: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest numbers in x.dtype, float32 or float64; see `bounded`. Rows without a scale mean nothing."""
    # A peak is exactly half a step beyond 127: it is set, so that no earlier rounding decides its number.
    reach = torch.full_like(peak, REACH[dtype])
    return bounded(torch.where(x.abs() == peak, reach.copysign(x), x * (reach / peak)), dtype)


def bounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Between least and largest number, whole ones for int8; 0 for NaN."""
    numbers = numbers.nan_to_num(0) if dtype != torch.int8 else numbers.nan_to_num(0).round()
    return numbers.clamp(LEAST[dtype], MOST[dtype])
