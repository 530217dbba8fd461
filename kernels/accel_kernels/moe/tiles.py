"""How large the tiles of the grouped products are: a few sizes, one of which suits a number of tokens."""

from typing import NamedTuple

GEMV = "gemv"  # in place of a tile's name: every choice by itself
# In place of it too: experts in fewer bits are written out in the dtype of the tokens first, for a tile of plain ones.
DEQUANTIZED = {f"written {name}": name for name in ("64", "128")}
# Mean pairs of an expert from which on that may be faster, and from which on it is expected to be. On an H200 some 1000
# pairs gain what writing costs (docs/measurements/batches.md); of MXFP4 some 200.
MAY_DEQUANTIZE, DEQUANTIZES = 192, 1024


class Tile(NamedTuple):
    """Pairs of one expert by outputs, that many inputs to a step; launch shape.

    inner: outputs of the first product, as gates, with as many ups beside them; outputs: of the second. depth: inputs
    of 16 bits; half as many of 32. tail: the last pairs of an expert, where they are so few, have a product of no more
    rows; 0 for none, as experts in fewer bits always have.
    """

    rows: int
    inner: int
    outputs: int
    depth: int
    warps: int
    stages: int
    tail: int = 0


# By name, the number of rows. Few rows: small tiles, so that many programs read weights at once. From 64 rows on Hopper
# multiplies by whole warpgroups, four warps to 64 rows. "128/64": products of 256 columns read least from the L2 cache.
# The last pairs of an expert, where they are fewer than 65, are multiplied as 64 rows.
TILES = {
    "16": Tile(16, 32, 64, 128, 4, 4),
    "32": Tile(32, 32, 64, 128, 4, 4),
    "64": Tile(64, 64, 128, 64, 4, 4),
    "128": Tile(128, 128, 128, 64, 8, 3),
    "128/64": Tile(128, 128, 256, 64, 8, 4, 64),
}


def mean_pairs(pairs: int, experts: int) -> float:
    """Of an expert that is chosen at all, about."""
    return pairs / max(1, min(pairs, experts))


def likely_tile(pairs: int, experts: int, itemsize: int = 2) -> str:
    """The name of the tile that should be best: one that most experts fill no second time.

    itemsize: bytes of a number of the experts, 1 for all that are quantized; the largest tile was the fastest in bf16
    alone. "32" is not among them: for Qwen3-30B-A3B's experts "64" was faster with nearly any number of tokens.
    """
    mean, largest = mean_pairs(pairs, experts), "128/64" if itemsize == 2 else "128"
    return "16" if mean <= 12 else "64" if mean <= 96 else largest
