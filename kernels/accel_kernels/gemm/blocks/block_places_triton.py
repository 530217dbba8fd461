"""Which blocks of a weight a kernel unpacks.

Each use begins at the numbers of the blocks anew. In Gluon layouts of all that hangs together are found from one that
is given; so each use finds its own.
"""

from typing import Any

import triton
import triton.language as tl


def arange(count: Any, _semantic: Any = None) -> Any:
    """0 to `count` - 1 in Triton and in Gluon, whose layout is found from what becomes of it."""
    if _semantic is None:  # interpreted
        return tl.arange(0, count)
    count = getattr(count, "value", count)
    return _semantic.arange(0, count, None) if hasattr(_semantic, "set_auto_layout") else _semantic.arange(0, count)


setattr(arange, tl.core.TRITON_BUILTIN, True)


@triton.jit
def block_places(at, N: tl.constexpr, B: tl.constexpr):
    """at: the first of N rows, the last there is, the first of B blocks of a row, and how many a row has.

    Returns (N, B): int64, a row times the blocks of a row, plus the place in it; and which of these are there.
    """
    row, last, first, blocks = at
    place = (first + arange(B))[None, :]
    block = tl.minimum(row + arange(N), last).to(tl.int64)[:, None] * blocks + place
    return block, tl.broadcast_to(place < blocks, (N, B))


@triton.jit
def piece_words(weight, at, N: tl.constexpr, B: tl.constexpr):
    """The four words of each of these pieces of 32 numbers of 4 bits, (N, B, 4) int32."""
    piece, mask = block_places(at, N, B)
    place = piece[:, :, None] * 4 + arange(4)[None, None, :]
    return tl.load(weight.data.to(tl.pointer_type(tl.int32)) + place, mask=mask[:, :, None], other=0)
