"""How the rows and lanes of an index space are cut into programs, and how a kernel reaches each tensor."""

from typing import NamedTuple

import torch

from accel_kernels.launch import floor_power_of_two, power_of_two
from accel_kernels.rowwise.program import HALF, MOVES_HALVES, MOVES_PAIRS, REDUCTIONS, RowProgram, register_widths

PLAIN, PAIRS, HALVES = "plain", "pairs", "halves"  # how a full register is held
ELEMENTS = 2048  # of a tile with several rows
PARTS = (256, 512, 1024, 2048)  # lanes of one part, where programs share a row
THREAD = 16  # elements of a tile to one thread
MOST_WARPS = 16
FULL_ENOUGH = 0.9  # of the best share of rows or lanes that are there, for which a larger tile is taken


class Memory(NamedTuple):
    """What a launch knows of a tensor: strides for the index space, and the dtype."""

    strides: tuple[int, ...]
    dtype: torch.dtype


class Access(NamedTuple):
    """How the kernel reaches one tensor.

    moves: for each dimension of the rows, the innermost first, whether its stride is not 0.
    lanes: the stride of the last dimension where it is 0, 1 or 2; -1 where it is given to the kernel.
    unit: the largest power of two up to 16 that divides all other strides, which are given in it.
    dtype: of its elements.
    """

    moves: tuple[bool, ...]
    lanes: int
    unit: int
    dtype: torch.dtype


class Tiling(NamedTuple):
    """How the index space is cut into programs.

    rows: of a tile, a power of two.
    inner: whether a tile's rows are of the innermost dimension; else of all dimensions in one.
    parts: where the parts of a row begin and the power of two that holds each, in lanes, or in pairs of lanes where
        full registers are two tiles.
    split: how many programs share a row, each with one part.
    wide: whether offsets take 64 bits.
    """

    rows: int
    inner: bool
    parts: tuple[tuple[int, int], ...]
    split: int
    wide: bool


def form_of(program: RowProgram) -> str:
    """How full registers are held."""
    names = {op.name for op in program.ops}
    if not names.isdisjoint(MOVES_PAIRS):
        return PAIRS
    return HALVES if HALF in register_widths(program) or not names.isdisjoint(MOVES_HALVES) else PLAIN


def collapsed(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes and strides of as few dimensions as there can be, the innermost first."""
    order = sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: _nearness(d, strides))
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for d in order:
        if sizes and all(rows[d] == mine[-1] * sizes[-1] for rows, mine in zip(strides, kept, strict=True)):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        for rows, mine in zip(strides, kept, strict=True):
            mine.append(rows[d])
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(mine) for mine in kept]


def _nearness(d: int, strides: list[tuple[int, ...]]) -> tuple[int, ...]:
    """By the strides of what is written, which is there in full."""
    return strides[-1][d], -d


def access_of(rows: tuple[int, ...], memory: Memory) -> Access:
    """rows: the strides of the collapsed dimensions."""
    unit = 16
    while any(stride % unit for stride in rows):
        unit //= 2
    lane = memory.strides[-1]
    return Access(tuple(stride != 0 for stride in rows), lane if lane in (0, 1, 2) else -1, unit, memory.dtype)


def farthest(sizes: tuple[int, ...], strides: tuple[int, ...], memory: Memory, width: int) -> int:
    """How many elements from the first the last one may lie, past the ends of tiles too."""
    over = sum(max(size, 64) * stride for size, stride in zip(sizes, strides, strict=True))
    return over + 2 * width * max(1, memory.strides[-1])


def warps_of(program: RowProgram, tiling: Tiling) -> int:
    """How many warps hold a tile."""
    elements = tiling.rows * sum(block for _, block in tiling.parts) * (1 if form_of(program) == PLAIN else 2)
    return min(MOST_WARPS, power_of_two(cdiv(elements, 32 * THREAD)))


def tiled(program: RowProgram, sizes: tuple[int, ...], wide: bool) -> tuple[Tiling, int]:
    """How rows, of these sizes from the innermost out, are cut into programs, and how many programs that makes."""
    pair = 1 if form_of(program) == PLAIN else 2
    units = program.width // pair or 1
    parts, split = _parts(units, any(op.name in REDUCTIONS for op in program.ops))
    most = max(1, ELEMENTS // (pair * sum(block for _, block in parts)))
    total = 1
    for size in sizes:
        total *= size
    rows = _fullest(sizes[0], floor_power_of_two(most))
    inner = len(sizes) == 1 or 4 * rows >= most
    if not inner:  # few rows side by side: tiles go on into the next ones
        rows = _fullest(total, floor_power_of_two(most))
    programs = cdiv(sizes[0], rows) * (total // sizes[0]) if inner else cdiv(total, rows)
    return Tiling(rows, inner, parts, split, wide), programs * split


def _fullest(count: int, most: int) -> int:
    """The largest power of two up to `most` that leaves few of the rows of tiles empty."""
    choices = [1 << n for n in range(most.bit_length())]
    full = {rows: count / (cdiv(count, rows) * rows) for rows in choices}
    return max(rows for rows in choices if full[rows] >= FULL_ENOUGH * max(full.values()))


def _parts(units: int, whole: bool) -> tuple[tuple[tuple[int, int], ...], int]:
    """The parts of a row that one program holds, and how many programs share a row.

    whole: whether a program needs the whole row: then the largest power of two and one more for the rest.
    """
    if whole or units <= PARTS[0]:
        block = floor_power_of_two(units)
        rest = power_of_two(units - block) if units > block else 0
        if rest in (0, block):
            return ((0, block + rest),), 1
        return ((0, block), (block, rest)), 1
    sizes = [size for size in PARTS if size < 2 * units]
    full = {size: units / (cdiv(units, size) * size) for size in sizes}
    block = max(size for size in sizes if full[size] >= FULL_ENOUGH * max(full.values()))
    return ((0, block),), cdiv(units, block)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
