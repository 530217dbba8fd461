"""A residual plus an RMSNorm: a program a row, all of it in registers, fp32, rounded once."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@triton.jit
def norm_add_kernel(
    x_ptr, norm, residual_ptr, factor_ptr, y_ptr, channels, scale, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * channels
    c_idx = tl.arange(0, BLOCK_C)
    mask = c_idx < channels
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if norm.weight is not None:
        weight = tl.load(norm.weight + c_idx, mask=mask, other=0.0).to(tl.float32) + norm.offset
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + c_idx, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row + c_idx, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / channels + norm.eps)
    if norm.weight is not None:
        y *= weight
    y = residual + scale * y
    if factor_ptr is not None:
        y *= factor
    tl.store(y_ptr + row + c_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def norm_add(x, norm, residual, *, scale=1.0, factor=None):
    """Same arguments and result as the reference; contiguous, up to 16384 channels."""
    y, channels = torch.empty_like(x), x.shape[-1]
    block = power_of_two(channels)
    launch(
        norm_add_kernel, (x.numel() // channels,), x, kernel_arguments(norm)[0], residual, factor, y, channels,
        float(scale), block, num_warps=min(16, max(1, block // 512)), **programmatic(x.device),
    )  # fmt: skip
    return y
