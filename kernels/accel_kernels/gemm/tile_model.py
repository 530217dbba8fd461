"""Which tile of a matrix product takes a card the least time, by counting, where nobody measured on that card.

It counts programs on the busiest multiprocessor and the sums of each. Steps of a pipeline and narrow tiles cost more;
with few warps a multiprocessor is slower. The constants are of an H200: of 42 products with
measured tiles the first of the order is within 2 % of the fastest one.
"""

from typing import Any

STEP = 110.0  # columns that would take as long as what a step costs besides its columns
NARROW = 0.34  # of a tile's time, more where it is half as wide as 128
FEW_WARPS, ONE_PROGRAM = 0.71, 0.66  # of the speed of a multiprocessor: with 4 warps, with one program of more
WARPS = 8  # with 255 registers to a thread that a multiprocessor has room for


def stage_bytes(tile: Any, x_bytes: int, weight_bytes: float, gate: bool) -> int:
    """Shared memory of one stage of a pipeline. tile: see `tile_cost`. x_bytes, weight_bytes: of a number."""
    x_rows, rows, columns = tile[:3]
    return int(columns * (x_rows * x_bytes + rows * weight_bytes * (1 + gate)))


def tile_cost(
    tile: Any, rows: int, n: int, gate: bool, x_bytes: int, weight_bytes: float, processors: int, room: int
) -> float:
    """About how long it takes, compared with other tiles of the same product; infinite where it does not fit.

    tile: rows of x, rows of the weight, columns of a step, warps, stages. x_bytes, weight_bytes: of a number. room:
    bytes of shared memory.
    """
    x_rows, columns, depth, warps, stages = tile[:5]
    held = stages * stage_bytes(tile, x_bytes, weight_bytes, gate)
    if held > room:
        return float("inf")
    programs = -(-(-(-rows // x_rows) * -(-n // columns)) // processors)
    together = min(programs, max(1, room // held), max(1, WARPS // warps))
    wide = columns * (1 + gate)
    work = x_rows * wide * (1 + STEP / depth) * (1 + NARROW * (128 / x_rows + 128 / wide - 2))
    speed = FEW_WARPS if together * warps <= 4 else ONE_PROGRAM if together == 1 else 1.0
    return programs * work / speed
