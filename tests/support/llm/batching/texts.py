"""Texts and sets of layers for the pool of blocks."""

from accel.llm.kv_cache.blocks import BLOCK
from accel.llm.kv_cache.layer_sets import LayerSet

FULL, NARROW, WIDE = LayerSet((0,), None), LayerSet((1,), 70), LayerSet((2,), 3 * BLOCK)
ROWS = 4


def text(letters, tail: int = 0) -> list[int]:
    """A block of each letter, and the beginning of one more: texts with equal blocks behind different ones."""
    return [letter for letter in letters for _ in range(BLOCK)] + [7] * tail
