"""Weights in blocks written out: each byte read once, each value written once."""

import torch
import triton
import triton.language as tl

from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.unpacking_triton import UNPACKING, format_flags, unpack_blocks
from accel_kernels.warmup import launch

NUMBERS, WARPS = 4096, 4  # of a program


@triton.jit
def dequantize_blocks_kernel(
    weight, y_ptr, blocks, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows of one block each: where rows of the weight end is no matter."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    values = unpack_blocks(weight, (first, blocks - 1, 0, 1), BLOCK_N, 1, FORMAT, COMPUTE, PLAIN)
    block = first + tl.arange(0, BLOCK_N)[:, None]
    place = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + place, values.to(y_ptr.dtype.element_ty), mask=block < blocks)


def dequantize_blocks(weight, dtype):
    """What `dequantize` gives of a `BlockWeight`."""
    y = torch.empty(weight.shape, device=weight.data.device, dtype=dtype)
    blocks, size = y.numel() // weight.format.columns, NUMBERS // weight.format.columns
    launch(
        dequantize_blocks_kernel, (triton.cdiv(blocks, size),),
        BlockArguments.of(weight), y, blocks, **format_flags(weight), BLOCK_N=size, num_warps=WARPS, **UNPACKING,
    )  # fmt: skip
    return y
