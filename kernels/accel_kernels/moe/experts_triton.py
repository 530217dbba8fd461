"""The chosen experts of few tokens, in two launches: gates and ups of every choice, then downs, summed over choices."""

import torch
import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate
from accel_kernels.launch import power_of_two
from accel_kernels.warmup import launch

ROWS, COLUMNS, WARPS = 4, 1024, 4  # of a weight to a program and step


@triton.jit(do_not_specialize=("chosen",))
def experts_up_kernel(
    x_ptr, index_ptr, w_ptr, h_ptr, chosen, inner,
    K: tl.constexpr, KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    choice = tl.program_id(1).to(tl.int64)
    expert = tl.load(index_ptr + choice)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < inner
    k_idx = tl.arange(0, BLOCK_K)
    row = (expert * 2 * inner + tl.minimum(n_idx, inner - 1))[:, None] * K
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k_idx
        mask = (at < K)[None, :]
        x = tl.load(x_ptr + (choice // chosen) * K + at, mask=at < K, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(w_ptr + row + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(w_ptr + row + inner * K + at[None, :], mask=mask, other=0.0).to(tl.float32) * x
    y = activate(tl.sum(gate, axis=1), KIND) * tl.sum(up, axis=1)
    tl.store(h_ptr + choice * inner + n_idx, y.to(h_ptr.dtype.element_ty), mask=n_mask)


@triton.jit(do_not_specialize=("chosen",))
def experts_down_kernel(
    h_ptr, index_ptr, share_ptr, w_ptr, y_ptr, chosen, hidden,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < hidden
    k_idx = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for choice in range(token * chosen, token * chosen + chosen):
        expert = tl.load(index_ptr + choice)
        share = tl.load(share_ptr + choice).to(tl.float32)
        row = (expert * hidden + tl.minimum(n_idx, hidden - 1))[:, None] * K
        for start in tl.static_range(0, K, BLOCK_K):
            at = start + k_idx
            h = tl.load(h_ptr + choice * K + at, mask=at < K, other=0.0).to(tl.float32) * share
            acc += tl.load(w_ptr + row + at[None, :], mask=(at < K)[None, :], other=0.0).to(tl.float32) * h[None, :]
    tl.store(y_ptr + token * hidden + n_idx, tl.sum(acc, axis=1).to(y_ptr.dtype.element_ty), mask=n_mask)


def experts(x, index, weights, gate_up, down, activation):
    """Same arguments and result as the reference; up to 16 tokens, sums in fp32."""
    tokens, hidden = x.shape
    chosen, inner = index.shape[1], down.shape[2]
    h = torch.empty((tokens * chosen, inner), device=x.device, dtype=x.dtype)
    y = torch.empty_like(x)
    launch(
        experts_up_kernel, (triton.cdiv(inner, ROWS), tokens * chosen), x, index, gate_up, h, chosen, inner,
        K=hidden, KIND=activation, BLOCK_N=ROWS, BLOCK_K=min(COLUMNS, power_of_two(hidden)), num_warps=WARPS,
    )  # fmt: skip
    launch(
        experts_down_kernel, (triton.cdiv(hidden, ROWS), tokens), h, index, weights, down, y, chosen, hidden,
        K=inner, BLOCK_N=ROWS, BLOCK_K=min(COLUMNS, power_of_two(inner)), num_warps=WARPS,
    )  # fmt: skip
    return y
