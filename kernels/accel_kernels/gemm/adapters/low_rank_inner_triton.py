"""A program has some rows of x and all of A, whose columns it walks along."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import interpreted, multiprocessors, programmatic, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

STAGES = 5


@triton.jit(do_not_specialize=("m",))
def low_rank_inner_kernel(
    x_ptr, down_ptr, y_ptr, m, K: tl.constexpr, OUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_idx, k_idx = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = tl.minimum(m_idx, m - 1).to(tl.int64)[:, None] * K
    down_row = tl.minimum(n_idx, OUTS - 1)[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for start in range(0, K, BLOCK_K):
        at = start + k_idx
        if K % BLOCK_K == 0:
            x = tl.load(x_ptr + row + at[None, :])
            down = tl.load(down_ptr + down_row + at[:, None])
        else:
            x = tl.load(x_ptr + row + at[None, :], mask=(at < K)[None, :], other=0.0)
            down = tl.load(down_ptr + down_row + at[:, None], mask=(at < K)[:, None], other=0.0)
        if UPCAST:
            x, down = x.to(tl.float32), down.to(tl.float32)
        acc = tl.dot(x, down, acc, input_precision="ieee")
    place = m_idx[:, None].to(tl.int64) * OUTS + n_idx[None, :]
    tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=(m_idx < m)[:, None] & (n_idx < OUTS)[None, :])


def low_rank_inner(x, down):
    """Same arguments and result as the reference."""
    (outs, k), rows = down.shape, x.numel() // x.shape[-1]
    y = torch.empty((*x.shape[:-1], outs), device=x.device, dtype=x.dtype)
    block = max(16, power_of_two(outs))
    height = 16
    while not interpreted() and height < 64 and cdiv(rows, height) > 2 * multiprocessors(x.device):
        height *= 2
    step = 64 if x.dtype == torch.float32 or block > 64 else 128
    launch(
        low_rank_inner_kernel, (cdiv(rows, height),), x, down, y, rows, K=k, OUTS=outs, BLOCK_M=height,
        BLOCK_N=block, BLOCK_K=step, UPCAST=upcast(x.dtype), num_warps=min(4, max(1, height * block // 256)),
        num_stages=STAGES, **programmatic(x.device),
    )  # fmt: skip
    return y
