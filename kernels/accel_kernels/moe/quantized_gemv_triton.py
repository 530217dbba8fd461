"""As `gemv_triton.py`, for experts in fewer bits: numbers are read once, and scaled in fp32.

UNIT: numbers to what is loaded at a time: 8 to an int32 of 4-bit ones, else 1. SCALES: to a row of the weight.
"""

import triton
import triton.language as tl

from accel_kernels.moe.gating_triton import apply_gating
from accel_kernels.moe.gemv_triton import expert_of


@triton.jit(do_not_specialize=("chosen", "experts"))
def quantized_rows_up_kernel(
    x_ptr, index_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, h_ptr, chosen, experts, inner,
    K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, there = expert_of(index_ptr, choice, experts)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n_idx, inner - 1)
    gate_row, up_row = n_row, inner + n_row
    if INTERLEAVED:
        gate_row, up_row = 2 * n_row, 2 * n_row + 1
    gate_row, up_row = expert * 2 * inner + gate_row, expert * 2 * inner + up_row
    x_ptr += (choice // chosen) * K
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(0, K // UNIT, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        gate += quantized_dot(x_ptr, w_ptr, scale_ptr, zero_ptr, gate_row, at, K, UNIT, SCALES)
        up += quantized_dot(x_ptr, w_ptr, scale_ptr, zero_ptr, up_row, at, K, UNIT, SCALES)
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if SCALES == 1:
        gate *= tl.load(scale_ptr + gate_row).to(tl.float32)
        up *= tl.load(scale_ptr + up_row).to(tl.float32)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + gate_row).to(tl.float32)
        up += tl.load(bias_ptr + up_row).to(tl.float32)
    y = tl.where(there, apply_gating(gate, up, KIND, ALPHA, LIMIT, SHIFT), 0.0)
    tl.store(h_ptr + choice * inner + n_idx, y.to(h_ptr.dtype.element_ty), mask=n_idx < inner)


@triton.jit(do_not_specialize=("experts",))
def quantized_rows_down_kernel(
    h_ptr, index_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, experts, hidden,
    K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of one choice; y: (pairs, hidden), fp32, for `shared_sum_kernel`."""
    choice = tl.program_id(1).to(tl.int64)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, _ = expert_of(index_ptr, choice, experts)
    row = expert * hidden + tl.minimum(n_idx, hidden - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, K // UNIT, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        acc += quantized_dot(h_ptr + choice * K, w_ptr, scale_ptr, zero_ptr, row, at, K, UNIT, SCALES)
    y = tl.sum(acc, axis=1)
    if SCALES == 1:
        y *= tl.load(scale_ptr + row).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(y_ptr + choice * hidden + n_idx, y, mask=n_idx < hidden)


@triton.jit
def quantized_dot(
    x_ptr, w_ptr, scale_ptr, zero_ptr, row, at, K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr
):
    """What rows (N,) of the weight and a vector x give at the units `at` (B,), as (N, B), not yet added up.

    Scaled by groups; where a row has one scale, that is left to whoever adds up.
    """
    mask = (at < K // UNIT)[None, :]
    w = tl.load(w_ptr + row[:, None] * (K // UNIT) + at[None, :], mask=mask, other=0.0)
    group = row[:, None] * SCALES + (at * UNIT // (K // SCALES))[None, :]
    zero = 0.0
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    if UNIT == 1:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        y = (w.to(tl.float32) - zero) * x[None, :]
    else:
        y = tl.zeros(w.shape, tl.float32)
        for place in tl.static_range(UNIT):
            x = tl.load(x_ptr + at * UNIT + place, mask=at < K // UNIT, other=0.0).to(tl.float32)
            y += (((w >> (4 * place)) & 15).to(tl.float32) - 8.0 - zero) * x[None, :]
    if SCALES > 1:
        y *= tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
    return y
