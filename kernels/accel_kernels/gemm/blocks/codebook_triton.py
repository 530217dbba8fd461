"""The unpacker of `codebook.py` inside kernels."""

import triton
import triton.language as tl

from accel_kernels.gemm.blocks.block_places_triton import block_places, piece_words
from accel_kernels.gemm.quantized.operands.unpacking_triton import side_by_side

# As a load it would be copied to shared memory ahead of a product, number by number.
LOOK_UP = tl.constexpr("{\n.reg .b64 at;\nmad.wide.u32 at, $1, 4, $2;\nld.global.nc.b32 $0, [at];\n}")


@triton.jit
def _number(code_ptr, words, SHIFT: tl.constexpr, PLAIN: tl.constexpr):
    place = (words >> SHIFT) & 15
    if PLAIN:
        return tl.load(code_ptr + place)
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP, "=f,r,l", [place, code_ptr.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def codebook(weight, at, N: tl.constexpr, B: tl.constexpr, PLAIN: tl.constexpr):
    """(N, B) pieces -> (N, B * 32). at: of `block_places`. PLAIN: without PTX, for the interpreter."""
    side = weight.side
    words = piece_words(weight, at, N, B)
    piece, mask = block_places(at, N, B)
    group = piece >> side.shift
    if side.code2 is not None:
        held = tl.load(side.absmax + group, mask=mask, other=0).to(tl.int32)
        scale = tl.load(side.code2 + held) * tl.load(side.absmax2 + (group >> 8), mask=mask, other=0.0)
        scale += tl.load(side.offset)
    else:
        scale = tl.load(side.absmax + group, mask=mask, other=0.0)
    f = ()
    for number in tl.static_range(8):  # the first of two in a byte's upper half
        f = f + (_number(side.code, words, number * 4 + 4 - number % 2 * 8, PLAIN),)
    return (side_by_side(f) * scale[:, :, None]).reshape(N, B * 32)
