"""residual + scale * (sum over ranks + bias) in one launch: every rank reads all parts ("one shot").

Each program copies its piece of this rank's part to where the others can read it, signals the same program of each
other rank, and waits for theirs. It adds all pieces up in the order of the ranks, so that all ranks get the same bits.
As torch's one-shot all-reduce (torch/csrc/distributed/c10d/symm_mem), with what follows it.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.collective.signals_triton import meet
from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

BLOCK = 1024  # numbers to a program
WARPS = 4


@triton.jit
def symmetric_sum_kernel(
    part_ptr, bias_ptr, residual_ptr, y_ptr, buffers_ptr, signals_ptr, place, count, columns, scale, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the next product may load its weights while the ranks wait for each other
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    i_idx = block * BLOCK + tl.arange(0, BLOCK)
    mask = i_idx < count
    part = tl.load(part_ptr + i_idx, mask=mask, other=0.0)
    own_ptr = tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(part_ptr.dtype.element_ty)), 16)
    tl.store(own_ptr + place + i_idx, part, mask=mask)
    meet(signals_ptr, block, rank, RANKS)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        peer_ptr = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(part_ptr.dtype.element_ty)), 16)
        # Past the first cache, which may hold another GPU's memory as it was at an earlier sum.
        total += tl.load(peer_ptr + place + i_idx, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + i_idx % columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        total = scale * total + tl.load(residual_ptr + i_idx, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + i_idx, total.to(y_ptr.dtype.element_ty), mask=mask)


def symmetric_sum(part, bias, residual, scale, buffers, signals, place, rank):
    """part: (..., N), contiguous; bias: (N,) or None; residual: like part or None. Returns a tensor like part.

    buffers, signals: (ranks,) int64, the addresses of each rank's memory for parts and for cells. place: where in the
    former, counted in numbers of this dtype, a multiple of 16 bytes.
    """
    y = torch.empty_like(part)
    grid = (cdiv(part.numel(), BLOCK),)
    launch(
        symmetric_sum_kernel, grid, part, bias, residual, y, buffers, signals, place, part.numel(), part.shape[-1],
        scale, rank, len(buffers), BLOCK, num_warps=WARPS, **programmatic(part.device),
    )  # fmt: skip
    return y
