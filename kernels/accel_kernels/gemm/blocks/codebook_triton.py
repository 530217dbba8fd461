"""The unpacker of `codebook.py` inside kernels."""

import triton
import triton.language as tl


@triton.jit
def codebook(weight, piece, mask):
    """(N, B) pieces -> (N, B * 32)."""
    side = weight.side
    place = piece[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    both = tl.load(weight.data + place, mask=mask[:, :, None], other=0).to(tl.int32)
    numbers = tl.join(tl.load(side.code + (both >> 4)), tl.load(side.code + (both & 15)))
    at = piece >> side.shift
    if side.code2 is not None:
        held = tl.load(side.absmax + at, mask=mask, other=0).to(tl.int32)
        scale = tl.load(side.code2 + held) * tl.load(side.absmax2 + (at >> 8), mask=mask, other=0.0)
        scale += tl.load(side.offset)
    else:
        scale = tl.load(side.absmax + at, mask=mask, other=0.0)
    return (numbers * scale[:, :, None, None]).reshape(piece.shape[0], piece.shape[1] * 32)
