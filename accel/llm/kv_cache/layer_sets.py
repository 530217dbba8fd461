"""Which layers share blocks: those with the same window, in sets that need equally large blocks.

A block of memory then serves any set. So blocks that a sliding window has passed can be used by all layers. vLLM and
others call this a hybrid allocator.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from accel.llm.kv_cache.shape import BLOCK, LayerShape, kv_layers

WASTE = 0.1  # share of the memory that may be lost to sets that do not fill their blocks
LONG = 8  # windows; how long a text is taken to be where what windows give back counts
MOST_SETS = 16  # each has a table of its own, which is kept and uploaded


class LayerSet(NamedTuple):
    """Layers that share a block. window: a query at t sees keys above t - window; None: all."""

    layers: tuple[int, ...]
    window: int | None

    def first_seen(self, length: int) -> int:
        """The first block that a token at `length` or later sees."""
        return 0 if self.window is None else max(0, (length - self.window + 1) // BLOCK)


def layer_sets(shapes: Sequence[LayerShape], windows: Sequence[int | None]) -> tuple[LayerSet, ...]:
    """Divides layers into sets; every layer with keys and values is in one. Without any there is a set of none.

    shapes, windows: one a layer, by its place in the cache; where several layers read one place, their widest window.
    A block is as large as the largest set needs. So there are as few sets as waste at most WASTE of the memory, for
    short texts and for texts of LONG windows. Else those that waste least: perhaps one set, with the widest window.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer in kv_layers(shapes):
        kinds.setdefault(windows[layer], []).append(layer)
    widest = None if None in kinds else max((window for window in kinds if window is not None), default=None)
    whole = LayerSet(tuple(kv_layers(shapes)), widest)
    if len(kinds) <= 1 or len(kinds) > MOST_SETS:
        return (whole,)

    distinct = list(dict.fromkeys(shapes[layer] for layer in whole.layers))
    sizes = np.array([shape.size for shape in distinct])
    held = np.array([[sum(shapes[layer] == s for layer in layers) for s in distinct] for layers in kinds.values()])
    # Tokens kept of a short text, and of a long one, where a window ends within a block: (2, kinds).
    long = LONG * max(window for window in kinds if window is not None) + BLOCK
    kept = np.array([[1] * len(kinds), [long if window is None else window + BLOCK for window in kinds]])
    least = kept @ (held @ sizes)  # bytes without waste, (2,)

    parts = _numbers_of_sets(len(kinds))
    page = -(-held // parts[:, :, None])  # layers of each shape in a set, (plans, kinds, shapes)
    waste = (page.max(1) @ sizes)[:, None] * (parts @ kept.T) / least - 1
    in_one = kept.max(1) * (held.sum(0) @ sizes) / least - 1
    worst = [float(in_one.max()), *waste.max(1).tolist()]
    total = [1, *parts.sum(1).tolist()]
    # Few sets where little is wasted, otherwise little waste.
    best = min(
        range(len(worst)), key=lambda i: (0, total[i], worst[i]) if worst[i] <= WASTE else (1, worst[i], total[i])
    )
    if best == 0:
        return (whole,)

    sets = []
    for number, (window, layers) in zip(parts[best - 1], kinds.items(), strict=True):
        of_shape = [[layer for layer in layers if shapes[layer] == s] for s in distinct]
        for part in range(number):
            runs = ((-(-len(same) // int(number)), same) for same in of_shape)
            chosen = sorted(layer for size, same in runs for layer in same[part * size : (part + 1) * size])
            if chosen:
                sets.append(LayerSet(tuple(chosen), window))
    return tuple(sets)


def _numbers_of_sets(kinds: int) -> np.ndarray:
    """Every way to have at least one set of each kind and at most MOST_SETS in all, (ways, kinds)."""
    ends = np.array(list(combinations(range(1, MOST_SETS + 1), kinds)))
    return np.diff(ends, axis=1, prepend=0)
