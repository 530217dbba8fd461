"""LayerNorm of x, or of x + shift + residual: a warp holds whole rows; stats in fp32, two passes in registers.

A row is cut into the largest power of two and the rest, so that widths such as 320 and 1280 leave no lane idle.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, floor_power_of_two, power_of_two
from accel_kernels.warmup import launch

WARP_ELEMENTS = 1024  # of rows, about, that one warp holds
ROWS = 4  # a program; one of rows above WIDE channels
WIDE = 1024


@triton.jit
def _part(x_ptr, residual_ptr, shift_ptr, sum_ptr, has_residual, has_shift, keep, place, mask, c_idx, c_mask):
    """A block of columns of the sum, rounded as it is stored, if there is an addend: that is what is normalized."""
    # Masks, not branches, leave out what is missing: a branch would let one load wait for the other.
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(shift_ptr + c_idx, mask=c_mask & has_shift, other=0.0).to(tl.float32)[None, :]
    x += tl.load(residual_ptr + place, mask=mask & has_residual, other=0.0).to(tl.float32)
    stored = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + place, stored, mask=mask & keep)
    return stored.to(tl.float32)


@triton.jit
def _finish(y_ptr, weight_ptr, bias_ptr, y, place, mask, c_idx, c_mask):
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("has_residual", "has_shift", "keep", "rows"))
def layer_norm_kernel(
    x_ptr, residual_ptr, shift_ptr, y_ptr, sum_ptr, weight_ptr, bias_ptr, has_residual, has_shift, keep, rows,
    channels, eps, BLOCK_C: tl.constexpr, REST_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    r_idx = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = r_idx.to(tl.int64)[:, None] * channels
    c_idx = tl.arange(0, BLOCK_C)
    c_mask = c_idx >= 0  # the largest power of two: all there
    mask = (r_idx < rows)[:, None] & c_mask[None, :]
    place = row + c_idx[None, :]
    x = _part(x_ptr, residual_ptr, shift_ptr, sum_ptr, has_residual, has_shift, keep, place, mask, c_idx, c_mask)
    total = tl.sum(x, axis=1)
    if REST_C:
        d_idx = BLOCK_C + tl.arange(0, REST_C)
        d_mask = d_idx < channels
        rest_mask = (r_idx < rows)[:, None] & d_mask[None, :]
        rest_place = row + d_idx[None, :]
        rest = _part(
            x_ptr, residual_ptr, shift_ptr, sum_ptr, has_residual, has_shift, keep, rest_place, rest_mask, d_idx, d_mask
        )
        total += tl.sum(rest, axis=1)
    mean = total / channels
    x -= mean[:, None]
    squares = tl.sum(x * x, axis=1)
    if REST_C:
        rest = tl.where(d_mask[None, :], rest - mean[:, None], 0.0)
        squares += tl.sum(rest * rest, axis=1)
    rstd = tl.rsqrt(squares / channels + eps)[:, None]
    _finish(y_ptr, weight_ptr, bias_ptr, x * rstd, place, mask, c_idx, c_mask)
    if REST_C:
        _finish(y_ptr, weight_ptr, bias_ptr, rest * rstd, rest_place, rest_mask, d_idx, d_mask)


def layer_norm(x, weight, bias, eps, *, residual=None, shift=None, keep=True):
    """Same arguments and result as the reference; x contiguous, up to 16384 channels."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    y = torch.empty_like(x)
    alone = residual is None and shift is None
    total = torch.empty_like(x) if keep and not alone else y
    # A missing addend is a flag and a pointer never used, not a kernel of its own to compile.
    addends = (x if residual is None else residual, x if shift is None else shift)
    block_c = floor_power_of_two(channels)
    rest_c = power_of_two(channels - block_c) if channels > block_c else 0
    block_r = ROWS if channels <= WIDE else 1
    warps = power_of_two(cdiv(block_r * channels, WARP_ELEMENTS))
    launch(
        layer_norm_kernel, (cdiv(rows, block_r),),
        x, *addends, y, total, weight, bias, residual is not None, shift is not None, total is not y, rows,
        channels, eps, block_c, rest_c, block_r, num_warps=warps, **programmatic(x.device),
    )  # fmt: skip
    return y if alone else (y, total if keep else None)
