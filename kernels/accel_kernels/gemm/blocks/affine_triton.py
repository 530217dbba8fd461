"""The unpacker of `affine.py` inside kernels."""

import triton
import triton.language as tl

from accel_kernels.gemm.blocks.block_places_triton import arange, block_places


@triton.jit
def affine(weight, at, N: tl.constexpr, B: tl.constexpr):
    """(N, B) pieces -> (N, B * 32). at: of `block_places`."""
    side = weight.side
    piece, mask = block_places(at, N, B)
    place = piece[:, :, None] * 4 + arange(4)[None, None, :]
    words = tl.load(weight.data.to(tl.pointer_type(tl.int32)) + place, mask=mask[:, :, None], other=0)
    piece, mask = block_places(at, N, B)
    number = piece.to(tl.int32)  # an int64 takes many more instructions to divide
    row = number // side.row
    group = (number - row * side.row) // side.group * side.rows + row
    scale = tl.load(side.scale + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    zero = tl.load(side.zero + group, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    f = ()
    for turn in tl.static_range(8):
        f = f + (((words << (28 - 4 * turn)) >> 28).to(tl.float32),)
    even = tl.join(tl.join(f[0], f[4]), tl.join(f[2], f[6]))
    odd = tl.join(tl.join(f[1], f[5]), tl.join(f[3], f[7]))
    numbers = tl.join(even, odd).reshape(N, B, 32)
    return (numbers * scale + zero).reshape(N, B * 32)
