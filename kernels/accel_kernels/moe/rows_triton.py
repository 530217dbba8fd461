"""One product of a token with the choices it made among experts stored by rows, and with experts that all tokens share.

Those come first: their weights are loaded before it is known what was chosen. On who may start early, see
`grouped_triton.py`.
"""

import triton
import triton.language as tl

from accel_kernels.moe.gating_triton import COLUMNS, apply_gating, gate_and_up_rows, offset_of


@triton.jit
def expert_of(index_ptr, choice, experts):
    """The expert of a choice, and whether there is one of that number; the first where there is not."""
    expert = tl.load(index_ptr + choice, cache_modifier=".cg")
    there = (expert >= 0) & (expert < experts)
    return tl.where(there, expert, 0), there


@triton.jit(do_not_specialize=("experts",))
def mixture_up_kernel(
    x_ptr, index_ptr, w_ptr, shared_gate_ptr, shared_up_ptr, h_ptr, experts, inner,
    K: tl.constexpr, SHARED: tl.constexpr, GATING: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of one token; program (i, j) takes the j-th of SHARED experts, then of the choices. h: (all of them, inner)."""
    place = tl.program_id(1)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_idx = tl.arange(0, BLOCK_K)
    mask = (k_idx < K)[None, :]
    if place < SHARED:
        row = (place * inner + tl.minimum(n_idx, inner - 1)).to(tl.int64)[:, None] * K + k_idx[None, :]
        g = tl.load(shared_gate_ptr + row, mask=mask, other=0.0)
        u = tl.load(shared_up_ptr + row, mask=mask, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        gate, up = both_sums(x_ptr, shared_gate_ptr + row, shared_up_ptr + row, g, u, k_idx, K)
        there = place < SHARED
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert, there = expert_of(index_ptr, place - SHARED, experts)
        gate_row, up_row = gate_and_up_rows(expert, n_idx, inner, INTERLEAVED, 2)
        gate_row, up_row = gate_row[:, None] * K + k_idx[None, :], up_row[:, None] * K + k_idx[None, :]
        g = tl.load(w_ptr + gate_row, mask=mask, other=0.0)
        u = tl.load(w_ptr + up_row, mask=mask, other=0.0)
        gate, up = both_sums(x_ptr, w_ptr + gate_row, w_ptr + up_row, g, u, k_idx, K)
    y = tl.where(there, apply_gating(gate, up, GATING), 0.0)
    tl.store(h_ptr + place * inner + n_idx, y.to(h_ptr.dtype.element_ty), mask=n_idx < inner)


@triton.jit
def both_sums(x_ptr, gate_place, up_place, g, u, k_idx, K: tl.constexpr):
    """The products of x with rows of two weights, whose first columns are loaded."""
    BLOCK_K: tl.constexpr = k_idx.shape[0]
    gate_sum = tl.zeros(g.shape, tl.float32)
    up_sum = tl.zeros(g.shape, tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k_idx
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        gate_sum += g.to(tl.float32) * x
        up_sum += u.to(tl.float32) * x
        if start + BLOCK_K < K:
            mask = (at + BLOCK_K < K)[None, :]
            g = tl.load(gate_place + start + BLOCK_K, mask=mask, other=0.0)
            u = tl.load(up_place + start + BLOCK_K, mask=mask, other=0.0)
    return tl.sum(gate_sum, axis=1), tl.sum(up_sum, axis=1)


@triton.jit
def weight_of_step(
    w_ptr, places_ptr, shared_ptr, index_ptr, n_row, k_idx, experts, hidden,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr, SHARED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of an expert and a block of inputs, counted by STEP; zeros where there is no expert of that number."""
    at = STEP % BLOCKS * BLOCK_K + k_idx
    if STEP // BLOCKS < SHARED:
        place = n_row.to(tl.int64)[:, None] * (SHARED * K) + (STEP // BLOCKS * K + at)[None, :]
        return tl.load(shared_ptr + place, mask=(at < K)[None, :], other=0.0)
    expert, there = expert_of(index_ptr, STEP // BLOCKS - SHARED, experts)
    if places_ptr is not None:
        w_ptr += offset_of(w_ptr, places_ptr + expert * COLUMNS)
    place = (expert * hidden + n_row)[:, None] * K + at[None, :]
    return tl.load(w_ptr + place, mask=(at < tl.where(there, K, 0))[None, :], other=0.0)


@triton.jit(do_not_specialize=("experts",))
def expert_rows_down_kernel(
    h_ptr, index_ptr, shares_ptr, w_ptr, bias_ptr, places_ptr, shared_ptr, share_ptr, x_ptr, residual_ptr, y_ptr,
    experts, hidden, scale, K: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Shared experts and a token's choices one after another, unrolled: the weights of two steps are loaded ahead.

    share_ptr: the weight whose product with x, through a sigmoid, is the share of the shared ones; None for 1.
    """
    token = tl.program_id(1).to(tl.int64)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_row = tl.minimum(n_idx, hidden - 1)
    k_idx = tl.arange(0, BLOCK_K)
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    STEPS: tl.constexpr = (SHARED + CHOSEN) * BLOCKS
    index_ptr += token * CHOSEN
    shares_ptr += token * CHOSEN
    h_ptr += token * (SHARED + CHOSEN) * K
    common = w_ptr, places_ptr, shared_ptr, index_ptr, n_row, k_idx, experts, hidden
    w = weight_of_step(*common, K, BLOCK_K, BLOCKS, SHARED, 0)
    next_w = weight_of_step(*common, K, BLOCK_K, BLOCKS, SHARED, min(1, STEPS - 1))
    shared_share = 1.0
    if share_ptr is not None:  # the kernel in front has waited for x
        h_idx = tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + h_idx, mask=h_idx < hidden, other=0.0).to(tl.float32)
        x *= tl.load(share_ptr + h_idx, mask=h_idx < hidden, other=0.0).to(tl.float32)
        shared_share = 1.0 / (1.0 + tl.exp(-tl.sum(x, axis=0)))
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.static_range(STEPS):
        later_w = next_w
        if step + 2 < STEPS:
            later_w = weight_of_step(*common, K, BLOCK_K, BLOCKS, SHARED, step + 2)
        share = shared_share
        if step // BLOCKS >= SHARED:
            share = tl.load(shares_ptr + step // BLOCKS - SHARED, cache_modifier=".cg").to(tl.float32)
        at = step % BLOCKS * BLOCK_K + k_idx
        h = tl.load(h_ptr + step // BLOCKS * K + at, mask=at < K, other=0.0).to(tl.float32) * share
        acc += w.to(tl.float32) * h[None, :]
        w = next_w
        next_w = later_w
        if bias_ptr is not None and step % BLOCKS == 0:
            expert, there = expert_of(index_ptr, step // BLOCKS, experts)
            bias = tl.load(bias_ptr + expert * hidden + n_row).to(tl.float32)
            shift += tl.where(there, bias * share, 0.0)
    y = (tl.sum(acc, axis=1) + shift) * scale
    if residual_ptr is not None:
        y += tl.load(residual_ptr + token * hidden + n_idx, mask=n_idx < hidden, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * hidden + n_idx, y.to(y_ptr.dtype.element_ty), mask=n_idx < hidden)
