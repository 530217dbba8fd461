"""LayerNorm of x, or of x + residual, a few whole rows a program; moments in fp32, two passes in registers."""

import torch
import triton
import triton.language as tl

from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.launch import power_of_two

TILE = 4096  # elements a program holds at once


@triton.jit(do_not_specialize=("has_residual", "has_shift", "rows"))
def layer_norm_kernel(
    x_ptr, residual_ptr, shift_ptr, y_ptr, sum_ptr, w_ptr, b_ptr, has_residual, has_shift, rows, channels, eps,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    r_idx = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c_idx = tl.arange(0, BLOCK_C)
    c_mask = c_idx < channels
    mask = (r_idx < rows)[:, None] & c_mask[None, :]
    place = r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if has_shift:
        x += tl.load(shift_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    if has_residual:
        x += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if has_residual or has_shift:
        stored = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + place, stored, mask=mask)
        x = stored.to(tl.float32)  # normalise what the next layer will read, as the unfused model does
    mean = tl.sum(x, axis=1) / channels
    deviation = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(deviation * deviation, axis=1) / channels + eps)
    y = deviation * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(w_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def layer_norm(x, weight, bias, eps, *, residual=None, shift=None):
    """Same arguments and result as the reference; x contiguous, up to 16384 channels."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    y = torch.empty_like(x)
    total = y if residual is None and shift is None else torch.empty_like(x)
    # A missing addend is a flag and a pointer never used, not a kernel of its own to compile.
    addends = (x if residual is None else residual, x if shift is None else shift)
    block_c = power_of_two(channels)
    block_r = max(1, min(TILE // block_c, power_of_two(rows)))
    warps = max(1, min(16, block_c * block_r // 512))
    launch(
        layer_norm_kernel, (triton.cdiv(rows, block_r),),
        x, *addends, y, total, weight, bias, residual is not None, shift is not None, rows, channels, eps,
        weight is not None, bias is not None, block_c, block_r, num_warps=warps,
    )  # fmt: skip
    return y if total is y else (y, total)


def _specimen(dtype):
    pointers = {f"{name}_ptr": f"*{dtype}" for name in ("x", "residual", "shift", "y", "sum", "w", "b")}
    types = pointers | {"has_residual": "i1", "has_shift": "i1", "rows": "i32", "channels": "i32", "eps": "fp32"}
    return types, {"HAS_WEIGHT": True, "HAS_BIAS": True, "BLOCK_C": 1024, "BLOCK_R": 4}


# What the compile check builds without a GPU: kernel, argument types, constants, warps.
SPECIMENS = tuple((layer_norm_kernel, *_specimen(dtype), 8) for dtype in ("fp16", "bf16", "fp32"))
