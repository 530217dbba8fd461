"""Blocks of all formats inside kernels, as float32.

To add a format, write its function in the `_triton` file of its family, and its line here. Kernels that call it are
launched with UNPACKING, or a library's two roundings would be one.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import interpreted
from accel_kernels.gemm.blocks.affine_triton import affine
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.codebook_triton import codebook
from accel_kernels.gemm.blocks.ggml_triton import unpack_ggml_blocks

UNPACKING = {"enable_fp_fusion": False}
COMPUTE = {torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def unpack_blocks(
    weight, at, N: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr, PLAIN: tl.constexpr
):
    """Blocks (N, B) as their values (N, B * columns) in float32, before they are rounded to the dtype of a product.

    weight: `BlockArguments`. at: of `block_places`; of blocks that are not there all values are finite. COMPUTE: in
    which dtype values are computed, and widened then. PLAIN: without PTX, for the interpreter.
    """
    if FORMAT == "nf4" or FORMAT == "fp4":
        return codebook(weight, at, N, B, PLAIN)
    elif FORMAT == "int4-affine":
        return affine(weight, at, N, B)
    else:
        return unpack_ggml_blocks(weight.data, at, N, B, FORMAT, COMPUTE)


def format_flags(weight: BlockWeight) -> dict[str, object]:
    """What kernels are compiled for."""
    return {
        "FORMAT": weight.format.name,
        "COLUMNS": weight.format.columns,
        "COMPUTE": COMPUTE[weight.compute],
        "PLAIN": interpreted(),
    }
