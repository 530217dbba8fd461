"""RMSNorm of x, or of x + residual: a program a row, all of it in registers, fp32."""

import torch
import triton
import triton.language as tl

from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.dependents import programmatic
from accel_kernels.triton_kernels.launch import power_of_two


@triton.jit(do_not_specialize=("has_residual",))
def rms_norm_kernel(
    x_ptr, residual_ptr, y_ptr, sum_ptr, w_ptr, has_residual, channels, eps, offset,
    HAS_WEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * channels
    c_idx = tl.arange(0, BLOCK_C)
    mask = c_idx < channels
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_WEIGHT:
        weight = tl.load(w_ptr + c_idx, mask=mask, other=0.0).to(tl.float32) + offset
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + c_idx, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row + c_idx, mask=mask & has_residual, other=0.0).to(tl.float32)
    stored = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + c_idx, stored, mask=mask & has_residual)
    x = stored.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / channels + eps)
    if HAS_WEIGHT:
        y *= weight
    tl.store(y_ptr + row + c_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x, weight, eps, *, offset=0.0, residual=None):
    """Same arguments and result as the reference; x contiguous, up to 16384 channels."""
    channels = x.shape[-1]
    y = torch.empty_like(x)
    total = y if residual is None else torch.empty_like(x)
    block = power_of_two(channels)
    pdl = programmatic(x.device)
    launch(
        rms_norm_kernel, (x.numel() // channels,),
        x, x if residual is None else residual, y, total, weight, residual is not None, channels, eps, offset,
        weight is not None, block, bool(pdl), num_warps=min(16, max(1, block // 512)), **pdl,
    )  # fmt: skip
    return y if residual is None else (y, total)


def _specimen(dtype):
    types = {f"{name}_ptr": f"*{dtype}" for name in ("x", "residual", "y", "sum", "w")}
    types |= {"has_residual": "i1", "channels": "i32", "eps": "fp32", "offset": "fp32"}
    return rms_norm_kernel, types, {"HAS_WEIGHT": True, "BLOCK_C": 4096, "PDL": False}, 8


SPECIMENS = tuple(_specimen(dtype) for dtype in ("fp16", "bf16", "fp32"))
