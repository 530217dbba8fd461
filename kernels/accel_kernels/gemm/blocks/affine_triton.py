"""The unpacker of `affine.py` inside kernels."""

import triton
import triton.language as tl

from accel_kernels.gemm.blocks.block_places_triton import block_places, piece_words
from accel_kernels.gemm.quantized.operands.unpacking_triton import side_by_side


@triton.jit
def affine(weight, at, N: tl.constexpr, B: tl.constexpr):
    """(N, B) pieces -> (N, B * 32). at: of `block_places`."""
    side = weight.side
    words = piece_words(weight, at, N, B)
    piece, mask = block_places(at, N, B)
    number = piece.to(tl.int32)  # an int64 takes many more instructions to divide
    row = number // side.row
    group = (number - row * side.row) // side.group * side.rows + row
    scale = tl.load(side.scale + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    zero = tl.load(side.zero + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    f = ()
    for turn in tl.static_range(8):
        f = f + (((words << (28 - 4 * turn)) >> 28).to(tl.float32),)
    return (side_by_side(f) * scale + zero).reshape(N, B * 32)
