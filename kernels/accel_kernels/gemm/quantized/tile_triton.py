"""What a program of `skinny_wgmma` has of a product, and where scales are multiplied."""

import functools
from typing import NamedTuple

from triton import constexpr_function


@constexpr_function
def post_scale(columns, groups, format, zeros, rows):
    """Whether one scale covers a piece of a row, so that it is left to the products; of many rows they are more."""
    piece = 128 if format == "int4" else 64
    return (groups > 1 or format == "int4" or zeros) and (columns // groups) % piece == 0 and rows <= 32


# Of a multiprocessor of an H200 in a microsecond, about: products of two numbers added up, and bytes from the L2 cache.
PRODUCTS, CACHED = 2.4e6, 45e3


class WgmmaTile(NamedTuple):
    """Rows of the weight to a tile, its gate's included; warps; stages of the rings; programs to a multiprocessor.

    x_rows: rows of x that a program takes, a power of two; 0 for all of them.
    """

    rows: int
    warps: int
    stages: int
    x_stages: int
    programs: int
    x_rows: int = 0


def wgmma_tile(rows: int, format: str, gate: bool) -> WgmmaTile:
    """For up to 64 rows, as measured on an H200.

    One program to a multiprocessor has to fill more than half of its shared memory, 114 KB: of smaller ones two come to
    the same while others have none, and a third of the time is lost.
    """
    if format == "int4":
        if rows > 16:
            return WgmmaTile(64, 4, 4, 2 if rows > 32 else 3, 2)
        return WgmmaTile(128, 4, 5, 2, 2) if gate or rows > 8 else WgmmaTile(64, 4, 5, 2, 4)
    if rows <= 8:
        return WgmmaTile(256, 8, 4, 4, 1)
    if rows <= 32:
        return WgmmaTile(128, 4, 6, 4, 1)
    return WgmmaTile(128, 4, 8, 4, 1) if gate else WgmmaTile(64, 4, 6, 3, 2)


# For more rows: two warpgroups, of which one unpacks while the other's products run. Of x 128 rows at a time, for any
# number of rows: with more a weight would be unpacked less often, but padding would be multiplied. 256 rows at a time
# gain 4 % for one product in fp8 and cost 9 to 23 % elsewhere (products --study many-rows).
BROAD_TILES = {
    "int4": WgmmaTile(128, 8, 4, 2, 1, 128),
    "int8": WgmmaTile(128, 8, 4, 3, 1, 128),
    "fp8": WgmmaTile(128, 8, 4, 3, 1, 128),
}


@functools.cache
def steps_of_a_program(tile: WgmmaTile, block_m: int, format: str, tiles: int, boxes: int, processors: int) -> int:
    """How many of all tiles' steps a program has, `boxes` to a tile; all programs run at once.

    Fewer steps take less time, but more programs then share a tile, and the last of them adds up their partial sums.
    """
    least = -(-tiles * boxes // (tile.programs * processors))
    if least >= boxes:
        return least
    return min(range(least, boxes + 1), key=lambda share: _microseconds(share, tile, block_m, format, boxes))


def _microseconds(share: int, tile: WgmmaTile, block_m: int, format: str, boxes: int) -> float:
    """That a program takes. Fitted by hand on an H200 to products 896 to 14336 wide, of up to 64 rows."""
    step = (0.3 + 0.002 * tile.rows) * (1.5 if format == "int4" else 1.0)
    if block_m > 64:  # by the card's rates
        columns = 256 if format == "int4" else 128
        step = max(step, tile.rows * block_m * columns / PRODUCTS, (tile.rows * 128 + block_m * columns * 2) / CACHED)
    adding = 0.013 * tile.rows * block_m / (32 * tile.warps)  # for each sum of the others'
    if share >= boxes:
        return share * step
    across = 1.5 if boxes % share else 0.0  # some have the end of one tile and the beginning of another
    return share * step + 1.5 + across + boxes / share * adding


def at_once(tile: WgmmaTile, block_m: int) -> int:
    """How many sums of a tile are read at a time: waiting for each in turn takes longer; 64 registers of a thread."""
    return max(1, min(8, 2048 * tile.warps // (tile.rows * block_m)))
