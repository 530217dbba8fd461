"""Adapters of low rank: a program has some rows of x, keeps x A^T in registers, and adds to a part of the columns."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import interpreted, multiprocessors, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

BLOCK_M, BLOCK_K, BLOCK_N = 32, 64, 64
PROGRAMS = 2  # to a multiprocessor, at which columns are not divided further
SPREAD = 8  # blocks of columns that a program has at least, as each computes x A^T


@triton.jit
def _sum(
    x_ptr, one, m_idx, m_mask, first, blocks, K: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one adapter to `blocks` blocks of columns from the `first` on. one: y, its row stride, A, B, scale, out."""
    DTYPE: tl.constexpr = one[2].dtype.element_ty
    r_idx, k_idx = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    row = m_idx.to(tl.int64)[:, None]
    inner = tl.zeros((m_idx.shape[0], BLOCK_R), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k_idx < K
        x = tl.load(x_ptr + row * K + (start + k_idx)[None, :], mask=m_mask[:, None] & inside[None, :], other=0.0)
        down = tl.load(
            one[2] + r_idx[None, :] * K + (start + k_idx)[:, None],
            mask=(r_idx < RANK)[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        if UPCAST:
            x, down = x.to(tl.float32), down.to(tl.float32)
        inner = tl.dot(x, down, inner, input_precision=PRECISION)
    inner = inner.to(DTYPE)
    if UPCAST:
        inner = inner.to(tl.float32)
    for block in range(first, first + blocks):
        n_idx = block * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < N
        up = tl.load(
            one[3] + n_idx[None, :] * RANK + r_idx[:, None], mask=(r_idx < RANK)[:, None] & n_mask[None, :], other=0.0
        )
        if UPCAST:
            up = up.to(tl.float32)
        added = tl.dot(inner, up, input_precision=PRECISION)
        mask = m_mask[:, None] & n_mask[None, :]
        y = tl.load(one[0] + row * one[1] + n_idx[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(one[5] + row * N + n_idx[None, :], (y + added * one[4]).to(one[5].dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def low_rank_sum_kernel(
    x_ptr, sums, rows, K: tl.constexpr, OUTS: tl.constexpr, RANKS: tl.constexpr, BLOCKS_R: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCKS: of columns, to a program. Programs: rows of x, columns of the widest sum, sums."""
    m_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCKS
    for number in tl.static_range(len(sums)):
        if tl.program_id(2) == number and first * BLOCK_N < OUTS[number]:
            last: tl.constexpr = (OUTS[number] + BLOCK_N - 1) // BLOCK_N
            blocks = tl.minimum(last - first, BLOCKS)
            _sum(
                x_ptr, sums[number], m_idx, m_idx < rows, first, blocks, K, OUTS[number], RANKS[number],
                BLOCKS_R[number], BLOCK_K, BLOCK_N, UPCAST, PRECISION,
            )  # fmt: skip


def low_rank_sum(x, ys, adapters):
    """Same arguments and result as the reference; the product with B, its scale and the sum are rounded once."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    outs = tuple(torch.empty(y.shape, device=y.device, dtype=y.dtype) for y in ys)
    sums = tuple(
        (y, y.stride(-2) if y.dim() > 1 else y.shape[-1], one.down, one.up, float(one.scale), out)
        for y, one, out in zip(ys, adapters, outs, strict=True)
    )
    ranks = tuple(one.down.shape[0] for one in adapters)
    widths = tuple(y.shape[-1] for y in ys)
    wide = adapters[0].down.dtype == torch.float32
    most = cdiv(max(widths), BLOCK_N)
    wanted = 1 if interpreted() else cdiv(PROGRAMS * multiprocessors(x.device), cdiv(rows, BLOCK_M) * len(ys))
    blocks = min(most, max(SPREAD, cdiv(most, wanted)))
    launch(
        low_rank_sum_kernel, (cdiv(rows, BLOCK_M), cdiv(most, blocks), len(ys)),
        x, sums, rows, K=columns, OUTS=widths, RANKS=ranks,
        BLOCKS_R=tuple(max(16, power_of_two(rank)) for rank in ranks), BLOCKS=blocks, BLOCK_M=BLOCK_M,
        BLOCK_K=BLOCK_K, BLOCK_N=BLOCK_N, UPCAST=wide or upcast(x.dtype), PRECISION="ieee" if wide else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return outs
