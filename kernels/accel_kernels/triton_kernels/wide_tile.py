"""What a program of `quantised_wgmma` has of a product, and where scales are multiplied."""

from typing import NamedTuple

from triton import constexpr_function


@constexpr_function
def broad(columns, groups, format, zeros, rows):
    """Whether one scale covers a piece of a row, so that it is left to the products; of many rows they are more."""
    piece = 128 if format == "int4" else 64
    return (groups > 1 or format == "int4" or zeros) and (columns // groups) % piece == 0 and rows <= 32


class WideTile(NamedTuple):
    """Rows of the weight to a tile, its gate's included; warps; stages of the rings; programs to a multiprocessor."""

    rows: int
    warps: int
    stages: int
    x_stages: int
    programs: int


def wide_tile(rows: int, format: str, gate: bool) -> WideTile:
    """As measured on an H200.

    One program to a multiprocessor has to fill more than half of its shared memory, 114 KB: of smaller ones two come to
    the same while others have none, and a third of the time is lost.
    """
    if format == "int4":
        if rows > 16:
            return WideTile(64, 4, 4, 2 if rows > 32 else 3, 2)
        return WideTile(128, 4, 5, 2, 2) if gate or rows > 8 else WideTile(64, 4, 5, 2, 4)
    if rows <= 8:
        return WideTile(256, 8, 4, 4, 1)
    if rows <= 32:
        return WideTile(128, 4, 6, 4, 1)
    return WideTile(128, 4, 8, 4, 1) if gate else WideTile(64, 4, 6, 3, 2)
