"""`accel_kernels.rounding` in registers."""

import torch
import triton
import triton.language as tl

from accel_kernels.rounding import LEAST, TOPS

CODES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}
AT_LEAST = tl.constexpr(LEAST)
INT8_TOP, FLOAT8_TOP = (tl.constexpr(top) for top in TOPS.values())


def code_of(scales: torch.Tensor | None, kept: torch.Tensor):
    """The dtype of stored codes, as kernels take it; None for a store that rounds nothing."""
    return None if scales is None else CODES[kept.dtype]


@triton.jit
def rounded(x, CODE: tl.constexpr):
    """Codes of x, (rows, D) in fp32, and the scale of every row."""
    TOP: tl.constexpr = INT8_TOP if CODE == tl.int8 else FLOAT8_TOP
    size = tl.abs(x)
    top, total = tl.max(size, axis=1), tl.sum(size, axis=1)
    top = tl.where(total == total, top, total)  # a maximum may leave NaN out
    small = top < AT_LEAST
    scale = tl.where(small, 0.0, top / TOP)
    codes = x * tl.where(small, 0.0, TOP / tl.where(small, 1.0, top))[:, None]
    if CODE == tl.int8:
        codes = tl.floor(codes + 0.5)
    return codes.to(CODE), scale
