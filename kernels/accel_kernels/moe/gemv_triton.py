"""Few tokens: gates and ups of every choice, then downs, summed over a token's choices; on the CUDA cores.

Every choice reads its expert's weights for itself. Weights stored by rows are multiplied a few rows at a time, see also
`rows_triton.py` and, of MXFP4, `mxfp4_triton.py`. Weights stored transposed are multiplied a few columns at a time,
while the next inputs are loaded.

On who may start early, see `grouped_triton.py`. UNIT, GROUPS: see `quantized_products_triton.py`.
"""

import triton
import triton.language as tl

from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.moe.gating_triton import apply_gating, gate_and_up_rows, placed_weight
from accel_kernels.moe.mxfp4_triton import mxfp4_sums
from accel_kernels.moe.quantized_products_triton import quantized_dot, scaled, shifted
from accel_kernels.moe.rows_triton import expert_of


@triton.jit(do_not_specialize=("chosen", "experts"))
def expert_up_kernel(
    x_ptr, index_ptr, weight, bias_ptr, places_ptr, h_ptr, chosen, experts, inner,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, GATING: tl.constexpr, INTERLEAVED: tl.constexpr,
    TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNPACK_MODE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """UNPACK_MODE: of MXFP4, of which BLOCK_K counts groups; None of what else there is."""
    choice = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, there = expert_of(index_ptr, choice, experts)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < inner
    k_idx = tl.arange(0, BLOCK_K)
    x_ptr += (choice // chosen) * K
    PRODUCTS: tl.constexpr = 2 if GATING.gated else 1
    if places_ptr is not None:
        words, scales, zeros = placed_weight(weight, places_ptr, expert)
        weight = PackedWeight(words, None if weight.scales is None else scales, None if weight.zeros is None else zeros)
    if TRANSPOSED:
        w_ptr = weight.words + expert * PRODUCTS * inner * K
        if bias_ptr is not None:
            bias_ptr += expert * PRODUCTS * inner
        if PRODUCTS == 1:
            up = sum_across(x_ptr, w_ptr + n_idx[None, :], n_mask, k_idx, inner, 1, K, False)
            if bias_ptr is not None:
                up += tl.load(bias_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
            gate = up
        elif INTERLEAVED:  # both in one stretch of memory, told apart at the end
            wide_idx = tl.program_id(0) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
            wide = sum_across(x_ptr, w_ptr + wide_idx[None, :], wide_idx < 2 * inner, k_idx, inner, 2, K, False)
            if bias_ptr is not None:
                wide += tl.load(bias_ptr + wide_idx, mask=wide_idx < 2 * inner, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(wide, (BLOCK_N, 2)))
        else:
            gate_sum = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            up_sum = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
            place = w_ptr + n_idx[None, :]
            mask = (k_idx < K)[:, None] & n_mask[None, :]
            w = tl.load(place + k_idx[:, None] * 2 * inner, mask=mask, other=0.0)
            u = tl.load(place + inner + k_idx[:, None] * 2 * inner, mask=mask, other=0.0)
            for start in range(0, K, BLOCK_K):
                at = start + k_idx
                x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)[:, None]
                later = at + BLOCK_K
                mask = (later < K)[:, None] & n_mask[None, :]
                next_ptr = place + later.to(tl.int64)[:, None] * 2 * inner
                next_w = tl.load(next_ptr, mask=mask, other=0.0)
                next_u = tl.load(next_ptr + inner, mask=mask, other=0.0)
                gate_sum += w.to(tl.float32) * x
                up_sum += u.to(tl.float32) * x
                w, u = next_w, next_u
            gate, up = tl.sum(gate_sum, axis=0), tl.sum(up_sum, axis=0)
            if bias_ptr is not None:
                gate += tl.load(bias_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
                up += tl.load(bias_ptr + inner + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    elif UNPACK_MODE is not None:
        gate_row, up_row = gate_and_up_rows(expert, n_idx, inner, INTERLEAVED, PRODUCTS)
        up, gate = mxfp4_sums(x_ptr, weight, up_row, gate_row, K, PRODUCTS == 2, BLOCK_K, UNPACK_MODE)
        gate, up = shifted(gate, bias_ptr, gate_row), shifted(up, bias_ptr, up_row)
    else:
        gate_row, up_row = gate_and_up_rows(expert, n_idx, inner, INTERLEAVED, PRODUCTS)
        gate_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        up_sum = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        if weight.scales is not None:
            for start in range(0, K // UNIT, BLOCK_K):
                at = start + k_idx
                if PRODUCTS == 2:
                    gate_sum += quantized_dot(x_ptr, weight, gate_row, at, K, UNIT, GROUPS)
                up_sum += quantized_dot(x_ptr, weight, up_row, at, K, UNIT, GROUPS)
        else:
            gate_place, up_place = weight.words + gate_row[:, None] * K, weight.words + up_row[:, None] * K
            for start in tl.static_range(0, K, BLOCK_K):
                at = start + k_idx
                mask = (at < K)[None, :]
                x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
                if PRODUCTS == 2:
                    gate_sum += tl.load(gate_place + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
                up_sum += tl.load(up_place + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
        gate, up = tl.sum(gate_sum, axis=1), tl.sum(up_sum, axis=1)
        gate, up = scaled(gate, weight, gate_row, GROUPS), scaled(up, weight, up_row, GROUPS)
        gate, up = shifted(gate, bias_ptr, gate_row), shifted(up, bias_ptr, up_row)
    y = tl.where(there, apply_gating(gate, up, GATING), 0.0)
    tl.store(h_ptr + choice * inner + n_idx, y.to(h_ptr.dtype.element_ty), mask=n_mask)


@triton.jit
def sum_across(x_ptr, place, n_mask, k_idx, outputs, PRODUCTS: tl.constexpr, K: tl.constexpr, WAIT: tl.constexpr):
    """x W^T of columns of a transposed weight, (N,): `place` is the first input of each, PRODUCTS * outputs from one
    input to the next. The next inputs are loaded while these are multiplied. WAIT: with the first, for the kernel in
    front. With one number in the place of PRODUCTS * outputs, a thread takes 167 registers instead of 128 (Hopper).
    """
    BLOCK_K: tl.constexpr = k_idx.shape[0]
    w = tl.load(place + k_idx[:, None] * PRODUCTS * outputs, mask=(k_idx < K)[:, None] & n_mask[None, :], other=0.0)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros(w.shape, tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k_idx
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)[:, None]
        later = at + BLOCK_K
        mask = (later < K)[:, None] & n_mask[None, :]
        next_w = tl.load(place + later.to(tl.int64)[:, None] * PRODUCTS * outputs, mask=mask, other=0.0)
        acc += w.to(tl.float32) * x
        w = next_w
    return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=("experts",))
def expert_down_kernel(
    h_ptr, index_ptr, weight, bias_ptr, places_ptr, y_ptr, experts, hidden,
    K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNPACK_MODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one choice, a weight in fewer bits, or a transposed one; y: (pairs, hidden), fp32, for `shared_sum_kernel`."""
    choice = tl.program_id(1).to(tl.int64)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < hidden
    k_idx = tl.arange(0, BLOCK_K)
    expert, _ = expert_of(index_ptr, choice, experts)
    h_ptr += choice * K
    if places_ptr is not None:
        words, scales, zeros = placed_weight(weight, places_ptr, expert)
        weight = PackedWeight(words, None if weight.scales is None else scales, None if weight.zeros is None else zeros)
    if weight.scales is None:
        w_ptr = weight.words + expert * K * hidden
        y = sum_across(h_ptr, w_ptr + n_idx[None, :], n_mask, k_idx, hidden, 1, K, PDL)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + expert * hidden + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    elif UNPACK_MODE is not None:
        row = expert * hidden + tl.minimum(n_idx, hidden - 1)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        y, _ = mxfp4_sums(h_ptr, weight, row, row, K, False, BLOCK_K, UNPACK_MODE)
        y = shifted(y, bias_ptr, row)
    else:
        row = expert * hidden + tl.minimum(n_idx, hidden - 1)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        for start in range(0, K // UNIT, BLOCK_K):
            acc += quantized_dot(h_ptr, weight, row, start + k_idx, K, UNIT, GROUPS)
        y = shifted(scaled(tl.sum(acc, axis=1), weight, row, GROUPS), bias_ptr, row)
    tl.store(y_ptr + choice * hidden + n_idx, y, mask=n_mask)
