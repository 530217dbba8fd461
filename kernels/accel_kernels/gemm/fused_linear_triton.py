"""Linear layers of few rows, at the speed at which memory gives the weights.

One row, or few beside a wider weight: a program multiplies a few rows of the weight on the CUDA cores, with the norm of
x computed on the way. Two to 64 rows: the tensor cores, with weights as the left factor, whose larger side few rows
would waste.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import multiprocessors, programmatic, shared_memory, upcast
from accel_kernels.gemm.adapters.low_rank_term import COPIES, LowRankArguments, by_row
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.epilogue_triton import (
    epilogue,
    hand_on,
    low_rank_operands,
    low_rank_sums,
    sigmoid_share,
    store_sum,
)
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch


class Shape(NamedTuple):
    """Rows of the weight and columns of it to a step, and launch shape."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    early: bool = False  # whether the next kernel may start with this one; else when this one's products are done


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, up_ptr, norm, after, low, y_ptr, n, K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    ACTIVATION: tl.constexpr, RANK: tl.constexpr, FIRST: tl.constexpr, COPIES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RANK: of adapters, 0 for none. FIRST: programs that multiply by their A, each by one row, so that they are the
    first to be done. They are the first of the launch, so that none of the others waits for one that has no place. 0:
    another launch has done it.
    """
    m = tl.program_id(1)
    x_ptr += m * K
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if FIRST > 0:
        ahead = tl.program_id(0) < FIRST
        n_idx = tl.where(ahead, tl.program_id(0), n_idx - FIRST * BLOCK_N)
        weight_ptr = tl.where(ahead, low.down, weight_ptr)
        if GATE:
            up_ptr = tl.where(ahead, low.down + RANK * K, up_ptr)
    n_mask = n_idx < n
    k_idx = tl.arange(0, BLOCK_K)
    most = tl.where(ahead, FIRST, n) if FIRST > 0 else n
    row = tl.minimum(n_idx, most - 1).to(tl.int64)[:, None] * K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The first weights before the wait: they do not depend on the kernel in front.
    mask = (k_idx < K)[None, :]
    w = tl.load(weight_ptr + row + k_idx[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    if GATE:
        u = tl.load(up_ptr + row + k_idx[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    WHOLE: tl.constexpr = BLOCK_K >= K
    if norm.weight is not None and WHOLE:
        nw = tl.load(norm.weight + k_idx, mask=k_idx < K, other=0.0).to(tl.float32) + norm.offset
    if PDL:
        tl.extra.cuda.gdc_wait()
    ROWS: tl.constexpr = FIRST * (1 + GATE)
    step = None
    if FIRST > 0:
        step = tl.load(low.step).to(tl.int64)
        operands = low_rank_operands(n_idx, n_mask, low, RANK, GATE, ROWS, COPIES)
    elif RANK > 0:
        operands = low_rank_operands(n_idx, n_mask, low, RANK, GATE, ROWS, COPIES)
    mean = 0.0
    rstd = 1.0
    if NORM == "layer":
        total = tl.zeros((BLOCK_K,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            total += tl.load(x_ptr + start + k_idx, mask=start + k_idx < K, other=0.0).to(tl.float32)
        mean = tl.sum(total, axis=0) / K
        total = tl.zeros((BLOCK_K,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            x = tl.load(x_ptr + start + k_idx, mask=start + k_idx < K, other=0.0).to(tl.float32)
            x = tl.where(start + k_idx < K, x - mean, 0.0)
            total += x * x
        rstd = tl.rsqrt(tl.sum(total, axis=0) / K + norm.eps)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if GATE:
        acc_u = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        at = start + k_idx
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM == "rms":  # a factor of the whole sum: it is known only when all of x has been seen, and needed then
            squares += x * x
        if NORM == "layer":
            x = (x - mean) * rstd
        if norm.weight is not None and WHOLE:
            x *= nw
        elif norm.weight is not None:
            x *= tl.load(norm.weight + at, mask=at < K, other=0.0).to(tl.float32) + norm.offset
        if norm.bias is not None:
            x += tl.load(norm.bias + at, mask=at < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATE:
            acc_u += u.to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            place = row + (at + BLOCK_K)[None, :]
            mask = (at + BLOCK_K < K)[None, :]
            w = tl.load(weight_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first")
            if GATE:
                u = tl.load(up_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first")
    y = tl.sum(acc, axis=1)
    if NORM == "rms":
        rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + norm.eps)
        y *= rstd
    other = y
    if GATE:
        other = tl.sum(acc_u, axis=1)
        if NORM == "rms":
            other *= rstd
    if FIRST > 0:
        if ahead:
            hand_on(low, step, tl.program_id(0), tl.max(y, axis=0), ROWS, COPIES)
            if GATE:
                hand_on(low, step, RANK + tl.program_id(0), tl.max(other, axis=0), ROWS, COPIES)
        else:
            y, other = low_rank_sums(y, other, operands, step, GATE)
        n_mask = n_idx < tl.where(ahead, 0, n)
    elif RANK > 0:
        y, other = low_rank_sums(y, other, operands, step, GATE)
    y = epilogue(y, other, n_idx, n_mask, None, None, after, GATE, ACTIVATION)
    if after.share is not None:
        y *= sigmoid_share(after, m, True)
    store_sum(y, m * n + n_idx, n_mask, after, y_ptr)


@triton.jit(do_not_specialize=("m",))
def skinny_kernel(
    x_ptr, weight_ptr, up_ptr, after, low, y_ptr, m, n, K: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr,
    RANK: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RANK: of adapters, 0 for none, in so many PARTS of the weight's rows."""
    n_idx = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_idx = tl.arange(0, BLOCK_M)
    k_idx = tl.arange(0, BLOCK_K)
    n_mask, m_mask = n_idx < n, m_idx < m
    row = tl.minimum(n_idx, n - 1).to(tl.int64)[:, None] * K
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_u = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + k_idx
        x_place = x_ptr + at[:, None] + m_idx[None, :] * K
        if K % BLOCK_K == 0:
            x = tl.load(x_place, mask=m_mask[None, :], other=0.0)
            w = tl.load(weight_ptr + row + at[None, :], eviction_policy="evict_first")
        else:
            x = tl.load(x_place, mask=m_mask[None, :] & (at < K)[:, None], other=0.0)
            w = tl.load(
                weight_ptr + row + at[None, :], mask=(at < K)[None, :], other=0.0, eviction_policy="evict_first"
            )
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATE:
            if K % BLOCK_K == 0:
                u = tl.load(up_ptr + row + at[None, :], eviction_policy="evict_first")
            else:
                u = tl.load(
                    up_ptr + row + at[None, :], mask=(at < K)[None, :], other=0.0, eviction_policy="evict_first"
                )
            if UPCAST:
                u = u.to(tl.float32)
            acc_u = tl.dot(u, x, acc_u, input_precision="ieee")
    if RANK > 0:
        r_idx, width = tl.arange(0, RANK), RANK * (PARTS + GATE)
        place = n_idx[:, None] * RANK + r_idx[None, :]
        rows = low.inner + m_idx[None, :] * width + r_idx[:, None]
        part = (n_idx >= low.first).to(tl.int32) + (n_idx >= low.second).to(tl.int32)
        for number in tl.static_range(PARTS):
            b = tl.load(low.up + place, mask=(n_mask & (part == number))[:, None], other=0.0)
            inner = tl.load(rows + number * RANK, mask=m_mask[None, :], other=0.0)
            if UPCAST:
                b, inner = b.to(tl.float32), inner.to(tl.float32)
            acc = tl.dot(b, inner, acc, input_precision="ieee")
        if GATE:
            b = tl.load(low.gate_up + place, mask=n_mask[:, None], other=0.0)
            inner = tl.load(rows + RANK, mask=m_mask[None, :], other=0.0)
            if UPCAST:
                b, inner = b.to(tl.float32), inner.to(tl.float32)
            acc_u = tl.dot(b, inner, acc_u, input_precision="ieee")
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    n_col, n_col_mask = n_idx[:, None], n_mask[:, None]
    y = epilogue(acc, acc_u, n_col, n_col_mask, None, None, after, GATE, ACTIVATION)
    if after.share is not None:
        y *= sigmoid_share(after, m_idx, m_mask)[None, :]
    store_sum(y, m_idx[None, :].to(tl.int64) * n + n_col, m_mask[None, :] & n_col_mask, after, y_ptr)


def fused_linear(x, weight, bias=None, *, norm=None, low_rank=None, shape=None, **after):
    """Same arguments and result as the reference; up to 64 rows. shape: a Shape, else chosen by size."""
    n, k = weight.shape
    rows = x.numel() // k
    epilogue = Epilogue(bias, **after)
    dtype = weight.dtype if epilogue.residual is None else epilogue.residual.dtype
    y = torch.empty((*x.shape[:-1], n), device=x.device, dtype=dtype)
    up, gate = epilogue.up, epilogue.up is not None
    rank = 0 if low_rank is None else low_rank.rank
    if rows == 1 or x.dtype != weight.dtype:
        shape = shape or gemv_shape(n, k, gate, norm is not None)
        together = low_rank is not None and low_rank.tagged is not None and low_rank.rows is None
        first = low_rank.down.shape[0] // (1 + gate) if together else 0
        inner = None
        if low_rank is not None and not together:
            inner = by_row(fused_linear(x, low_rank.down, norm=norm), low_rank.rows)
        before, kind = kernel_arguments(norm)
        launch(
            gemv_kernel, (first + cdiv(n, shape.rows), rows), x, weight, up, before, epilogue.arguments,
            LowRankArguments.of(low_rank, inner), y, n, K=k, NORM=kind, **epilogue.flags, RANK=rank, FIRST=first,
            COPIES=COPIES, BLOCK_N=shape.rows, BLOCK_K=shape.columns, num_warps=shape.warps, **programmatic(x.device),
        )  # fmt: skip
        return y
    shape = shape or skinny_shape(rows, n, k, gate, norm is not None, x.device)
    if norm is not None:  # a pass of its own: inside, it would stand between the weights and the tensor cores
        x = apply_norm(x, norm)
    inner = None if low_rank is None else low_rank.inner(x)
    pdl = programmatic(x.device, rows > 16 or shape.early)  # as measured
    launch(
        skinny_kernel, (cdiv(n, shape.rows),), x, weight, up, epilogue.arguments,
        LowRankArguments.of(low_rank, inner), y, rows, n, K=k, **epilogue.flags, RANK=rank,
        PARTS=0 if low_rank is None else len(low_rank.ends), BLOCK_M=max(16, power_of_two(rows)), BLOCK_N=shape.rows,
        BLOCK_K=shape.columns, EARLY=shape.early, UPCAST=upcast(x.dtype), num_warps=shape.warps,
        num_stages=shape.stages, **pdl,
    )  # fmt: skip
    return y


def gemv_shape(n: int, k: int, gate: bool, norm: bool) -> Shape:
    """As measured on an H200. With a norm all columns in one step, so that x is read once; but where a fifth of such a
    step would lie beyond the columns, wide ones and those of many rows take small steps.
    """
    if 1024 < k <= 4096 and 4 * power_of_two(k) >= 5 * k and n >= 1024 and not gate:
        if k < 2048:
            return Shape(8, 512, 4) if norm and n >= 3072 else Shape(4, 2048, 8)
        if norm:
            return Shape(4, 1024, 4)
    columns = min(4096 if norm or k > 8192 or n > 32768 else 2048, power_of_two(k))
    rows = max(1, (16384 if norm and not gate else 8192 if norm else 4096) // columns)
    while rows > 1 and n // rows < 256:
        rows //= 2
    return Shape(rows, columns, 4 if k > 8192 or rows * columns < 4096 else 8)


def skinny_shape(rows: int, n: int, k: int, gate: bool, norm: bool, device: torch.device) -> Shape:
    """As measured on an H200; as many stages as shared memory holds.

    After a norm, whose few programs leave the GPU empty, the next kernel may start early. After another product it
    must wait: its programs would crowd where that one leaves room, several to a multiprocessor.
    """
    few = rows <= 16
    block = next((block for block in (64, 32) if n // block >= 60), 16)
    if few and not (gate or norm) and k > 8192 and 0 <= multiprocessors(device) - cdiv(n, 32) <= 12:
        return Shape(32, 256, 4, max(2, min(4, shared_memory(device) // (2 * 256 * (32 + 16)))))
    stage = 2 * 128 * (block * (2 if gate else 1) + max(16, power_of_two(rows)))
    most = (3 if few and norm else 4) if gate else 5
    return Shape(block, 128, 4, max(2, min(most, shared_memory(device) // stage)), few and norm)
