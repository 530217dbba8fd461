"""RMSNorm of x, or of x + residual: a program a group of a row, all of it in registers, fp32."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@triton.jit
def gate_factor(gate_ptr, c_idx, mask, SILU: tl.constexpr):
    gate = tl.load(gate_ptr + c_idx, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    return gate * factor if SILU else factor


@triton.jit(do_not_specialize=("has_residual",))
def rms_norm_kernel(
    x_ptr, residual_ptr, y_ptr, sum_ptr, weight_ptr, gate_ptr, has_residual, channels, groups, gate_stride, eps, offset,
    GATE: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """channels: of a group. GATE: None, or "first" or "last"."""
    program = tl.program_id(0).to(tl.int64)
    row, group = program * channels, program % groups * channels
    c_idx = tl.arange(0, BLOCK_C)
    mask = c_idx < channels
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + group + c_idx, mask=mask, other=0.0).to(tl.float32) + offset
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + c_idx, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row + c_idx, mask=mask & has_residual, other=0.0).to(tl.float32)
    stored = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + c_idx, stored, mask=mask & has_residual)
    x = stored.to(tl.float32)
    if GATE is not None:
        factor = gate_factor(gate_ptr + program // groups * gate_stride + group, c_idx, mask, SILU)
    if GATE == "first":
        x *= factor
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / channels + eps)
    if weight_ptr is not None:
        y *= weight
    if GATE == "last":
        y *= factor
    y = y.to(x_ptr.dtype.element_ty)
    tl.store(y_ptr + row + c_idx, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x, weight, eps, *, offset=0.0, residual=None, groups=1, gate=None, dtype=None):
    """Same arguments and result as the reference; x contiguous, up to 16384 channels."""
    channels = x.shape[-1] // groups
    y = torch.empty_like(x, dtype=dtype)
    total = x if residual is None else torch.empty_like(x)
    rows = x if gate is None else gate.by.reshape(-1, x.shape[-1])  # a view wherever rows are evenly spaced
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    when = None if gate is None else "first" if gate.first else "last"
    block = power_of_two(channels)
    launch(
        rms_norm_kernel, (x.numel() // channels,),
        x, x if residual is None else residual, y, total, weight, rows, residual is not None, channels, groups,
        rows.stride(-2) if gate is not None else 0, eps, offset,
        when, gate is not None and gate.activation == "silu", block, 
        num_warps=min(16, max(1, block // 512)), **programmatic(x.device),
    )  # fmt: skip
    return y if residual is None else (y, total)
