"""Which tile of a matrix product takes a card the least time, by counting, where nobody measured on that card.

It counts programs on the busiest multiprocessor and the sums of each. Steps of a pipeline and narrow tiles cost more;
with few warps a multiprocessor is slower. What each costs was fitted on an H200, as it is and as a card of 8.9, whose
tensor cores read registers: the first of the order is within 2 % of the fastest one, of 42 products with measured
tiles, and there within 9 %, of 20.
"""

from typing import Any, NamedTuple

from accel_kernels.device import Card, Feature

WARPS = 8  # with 255 registers to a thread that a multiprocessor has room for


class Costs(NamedTuple):
    """Of tensor cores of a kind.

    step: columns that would take as long as what a step costs besides its columns. narrow: of a tile's time, more where
    it is half as wide as 128. few_warps, one_program: shares of the speed of a multiprocessor that has 4 warps, or one
    program of more.
    """

    step: float
    narrow: float
    few_warps: float
    one_program: float


SHARED_OPERANDS = Costs(110.0, 0.34, 0.71, 0.66)
REGISTERS = Costs(0.0, 0.36, 0.85, 1.0)  # of four warps, whose tiles are the faster ones there


def reads_registers(known: Card) -> bool:
    """Whether what tensor cores multiply lies in registers."""
    return Feature.SHARED_OPERANDS not in known.features


def stage_bytes(tile: Any, x_bytes: int, weight_bytes: float, gate: bool) -> int:
    """Shared memory of one stage of a pipeline. tile: see `tile_cost`. x_bytes, weight_bytes: of a number."""
    x_rows, rows, columns = tile[:3]
    return int(columns * (x_rows * x_bytes + rows * weight_bytes * (1 + gate)))


def held_stages(stages: int, known: Card) -> int:
    """Of a pipeline, in shared memory: all but the one that is multiplied where that lies in registers."""
    return max(1, stages - reads_registers(known))


def tile_cost(tile: Any, rows: int, n: int, gate: bool, x_bytes: int, weight_bytes: float, known: Card) -> float:
    """About how long it takes, compared with other tiles of the same product; infinite where it does not fit.

    tile: rows of x, rows of the weight, columns of a step, warps, stages. x_bytes, weight_bytes: of a number. known:
    the card.
    """
    x_rows, columns, depth, warps, stages = tile[:5]
    costs = REGISTERS if reads_registers(known) else SHARED_OPERANDS
    held = held_stages(stages, known) * stage_bytes(tile, x_bytes, weight_bytes, gate)
    if held > known.shared_memory:
        return float("inf")
    programs = -(-(-(-rows // x_rows) * -(-n // columns)) // known.processors)
    together = min(programs, max(1, known.shared_memory // held), max(1, WARPS // warps))
    wide = columns * (1 + gate)
    work = x_rows * wide * (1 + costs.step / depth) * (1 + costs.narrow * (128 / x_rows + 128 / wide - 2))
    speed = costs.few_warps if together * warps <= 4 else costs.one_program if together == 1 else 1.0
    return programs * work / speed
