"""How large the tiles of the grouped products are: a few sizes, one of which suits a number of tokens."""

from typing import NamedTuple

GEMV = "gemv"  # in place of a tile's name: every choice by itself


class Tile(NamedTuple):
    """Pairs of one expert by outputs, that many inputs to a step; launch shape.

    inner: outputs of the first product, as gates, with as many ups beside them; outputs: of the second. depth: inputs
    of 16 bits; half as many of 32.
    """

    rows: int
    inner: int
    outputs: int
    depth: int
    warps: int
    stages: int


# By name, the number of rows. Few rows: small tiles, so that many programs read weights at once. From 64 rows on Hopper
# multiplies by whole warpgroups, four warps to 64 rows.
TILES = {
    "16": Tile(16, 32, 64, 128, 4, 4),
    "32": Tile(32, 32, 64, 128, 4, 4),
    "64": Tile(64, 64, 128, 64, 4, 4),
    "128": Tile(128, 128, 128, 64, 8, 3),
}


def likely_tile(pairs: int, experts: int) -> str:
    """The name of the tile that should be best: one that most experts fill no second time."""
    mean = pairs / max(1, min(pairs, experts))
    return next((name for name, most in (("16", 12), ("32", 24), ("64", 96)) if mean <= most), "128")
