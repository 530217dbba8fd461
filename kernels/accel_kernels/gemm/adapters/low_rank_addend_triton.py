"""x A^T of a few rows, all of whose inputs are loaded ahead, and its product with B, by one program."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import shared_memory, upcast
from accel_kernels.gemm.adapters.low_rank_addend import part_starts
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch


class Shape(NamedTuple):
    """Rows of x to a program, columns of x and of the result to a step, and launch shape, as measured on an H100."""

    rows: int = 32
    inputs: int = 128
    outputs: int = 128
    warps: int = 4
    stages: int = 6


@triton.jit
def low_rank_addend_kernel(
    x_ptr, down_ptr, up_ptr, starts_ptr, rows_ptr, bias_ptr, y_ptr, m, n, alike, K: tl.constexpr,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """alike: rows of x to a row of rows_ptr."""
    part = tl.program_id(1)
    start, end = tl.load(starts_ptr + part), tl.load(starts_ptr + part + 1)
    m_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask, r_idx, k_idx = m_idx < m, tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_rows = x_ptr + tl.minimum(m_idx, m - 1).to(tl.int64)[:, None] * K
    down_rows = down_ptr + (part * RANK + r_idx)[None, :] * K
    inner = tl.zeros((BLOCK_M, RANK), tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + k_idx
        if K % BLOCK_K == 0:
            x, down = tl.load(x_rows + at[None, :]), tl.load(down_rows + at[:, None])
        else:
            x = tl.load(x_rows + at[None, :], mask=(at < K)[None, :], other=0.0)
            down = tl.load(down_rows + at[:, None], mask=(at < K)[:, None], other=0.0)
        if UPCAST:
            x, down = x.to(tl.float32), down.to(tl.float32)
        inner = tl.dot(x, down, inner, input_precision="ieee")
    if rows_ptr is not None:
        kept = (m_idx // alike)[:, None] * (tl.num_programs(1) * RANK) + (part * RANK + r_idx)[None, :]
        inner *= tl.load(rows_ptr + kept, mask=m_mask[:, None], other=0.0).to(tl.float32)
    inner = inner.to(x_ptr.dtype.element_ty)
    if UPCAST:
        inner = inner.to(tl.float32)
    for column in range(start, end, BLOCK_N):
        n_idx = column + tl.arange(0, BLOCK_N)
        n_mask = n_idx < end
        up = tl.load(up_ptr + n_idx[None, :] * RANK + r_idx[:, None], mask=n_mask[None, :], other=0.0)
        if UPCAST:
            up = up.to(tl.float32)
        y = tl.dot(inner, up, input_precision="ieee")
        if bias_ptr is not None:
            y += tl.load(bias_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        place, mask = m_idx.to(tl.int64)[:, None] * n + n_idx[None, :], m_mask[:, None] & n_mask[None, :]
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def low_rank_addend(x, term, bias=None):
    """Same arguments and result as the reference."""
    k, n = x.shape[-1], len(term.up)
    rows, inputs = x.numel() // k, min(128, power_of_two(k))
    step = inputs * (Shape().rows + term.rank) * x.itemsize
    shape = Shape(inputs=inputs, stages=min(Shape().stages, 1 + shared_memory(x.device) // step))
    y = torch.empty((*x.shape[:-1], n), device=x.device, dtype=x.dtype)
    starts = part_starts(term.ends, x.device) if term.starts is None else term.starts
    launch(
        low_rank_addend_kernel, (cdiv(rows, shape.rows), len(term.ends)), x, term.down, term.up, starts, term.rows,
        bias, y, rows, n, 1 if term.rows is None else rows // len(term.rows), K=k, RANK=term.rank,
        BLOCK_M=shape.rows, BLOCK_K=shape.inputs, BLOCK_N=shape.outputs, UPCAST=upcast(x.dtype),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y
