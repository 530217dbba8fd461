"""The unpacker of GGUF's blocks as a kernel of its own."""

import torch
import triton
import triton.language as tl
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.ggml_triton import unpack_ggml_blocks

DTYPES = {torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def write_kernel(
    weight_ptr, y_ptr, rows, blocks, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_N)[:, None]
    block = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)[None, :]
    mask = (row < rows) & (block < blocks)
    values = unpack_ggml_blocks(weight_ptr, row.to(tl.int64) * blocks + block, mask, FORMAT, COMPUTE)
    column = tl.program_id(0) * BLOCK_B * COLUMNS + tl.arange(0, BLOCK_B * COLUMNS)[None, :]
    columns = blocks * COLUMNS
    tl.store(y_ptr + row * columns + column, values, mask=(row < rows) & (column < columns))


def written(weight: BlockWeight) -> torch.Tensor:
    """(N, K) float32 of up to 8 rows, four blocks a program."""
    (n, k), format = weight.shape, weight.format
    y = torch.full((n, k), float("nan"), device=weight.data.device)
    blocks = k // format.columns
    write_kernel[(triton.cdiv(blocks, 4),)](
        weight.data, y, n, blocks, FORMAT=format.name, COMPUTE=DTYPES[weight.compute], COLUMNS=format.columns,
        BLOCK_N=8, BLOCK_B=4,
    )  # fmt: skip
    return y
