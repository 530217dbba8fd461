"""Keys and values in 8 bits: codes of one token and head with one scale, x = code * scale.

The scale is that of the largest element, so nothing is cut off and no calibration is needed. Each token and head has
its own: one for a whole tensor fails where a head is an outlier (KIVI, Liu et al. 2024, compares granularities).
"""

import torch

# The largest code: of float8_e4m3fn the largest number there is; of int8 the same on both sides of zero.
TOPS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = 1e-30  # heads without an element above it are stored as zeros: their scale would leave the range of fp32


def rounded(t: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of t, (..., D), in a dtype of TOPS, and their scales, (...) float32.

    To the nearest code; int8 upwards from the middle of two, float8 to the even one. A head of zeros has scale 0; one
    with NaN or infinity in it is not finite when read.
    """
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    top = wide.abs().amax(-1)
    small = top < LEAST
    most = torch.full_like(top, TOPS[dtype])  # by a plain number torch may divide, and divides one, in two roundings
    scales = (top / most).masked_fill(small, 0.0).float()
    codes = wide * (most / top).masked_fill(small, 0.0).unsqueeze(-1)
    if dtype == torch.int8:
        below = codes.floor()
        codes = below.add_(codes.sub_(below) >= 0.5)  # in place: each pass over these takes time
    return codes.to(dtype), scales


def restored(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes (..., D) with scales (...) stand for, in this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)
