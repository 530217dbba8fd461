"""How the rows and lanes of an index space are cut into programs, and how a kernel reaches each tensor."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from accel_kernels.rowwise.program import HALF, MOVES_HALVES, MOVES_PAIRS, REDUCTIONS, RowProgram, register_widths
from accel_kernels.sizes import cdiv, power_of_two

PLAIN, PAIRS, HALVES = "plain", "pairs", "halves"  # how a full register is held
WARP = 256  # elements of a tile to one warp: 16 bytes of 16 bit to a thread
ROWS = 4  # warps of a tile of several short rows
MOST_HEADS = 64  # rows side by side for whose number a kernel is compiled: it divides by it
MOST_WARPS = 16
TILES = (2, 3, 4, 1)  # how many tiles of a long row a thread holds, the likeliest first
PARTS = (256, 512, 1024, 2048)  # lanes of one part, where programs share a row
THREAD = 16  # of its elements to one thread
FULL_ENOUGH = 0.9  # of the best share of rows or lanes that are there, for which a better shape is taken


class Memory(NamedTuple):
    """What a launch knows of a tensor: strides for the index space, after how many lanes it repeats, and the dtype."""

    strides: tuple[int, ...]
    period: int
    dtype: torch.dtype


class Access(NamedTuple):
    """How the kernel reaches one tensor.

    moves: for each dimension of the rows, the innermost first, whether its stride is not 0.
    lanes: the stride of the last dimension where it is 0, 1 or 2; -1 where it is given to the kernel.
    unit: the largest power of two up to 16 that divides all other strides, which are given in it.
    period: after how many lanes it repeats; 0 where it does not.
    dtype: of its elements.
    """

    moves: tuple[bool, ...]
    lanes: int
    unit: int
    period: int
    dtype: torch.dtype


class Tiling(NamedTuple):
    """How the index space is cut into programs.

    rows: of a tile, a power of two.
    inner: whether a tile's rows are of the innermost dimension; else of all dimensions in one.
    side: the size of the innermost dimension where the kernel is compiled for it, as for a number of heads; else 0.
    block: of a tile, a power of two, in lanes, or in pairs of lanes where a full register holds two for each.
    parts: how many such tiles follow one another in a program.
    split: how many programs share a row.
    wide: whether offsets take 64 bits.
    warps: of a program.
    """

    rows: int
    inner: bool
    side: int
    block: int
    parts: int
    split: int
    wide: bool
    warps: int


def form_of(program: RowProgram) -> str:
    """How full registers are held."""
    names = {op.name for op in program.ops}
    if not names.isdisjoint(MOVES_PAIRS):
        return PAIRS
    return HALVES if HALF in register_widths(program) or not names.isdisjoint(MOVES_HALVES) else PLAIN


def expanded(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, dims: int, width: int) -> Memory:
    """The strides of a tensor expanded to so many dimensions and lanes."""
    moving = tuple(0 if one == 1 else stride for one, stride in zip(size, strides, strict=True))
    last = size[-1] if size else 1
    return Memory((0,) * (dims - len(size)) + moving, 0 if last in (1, width) else last, dtype)


def contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(prod(size[d + 1 :]) for d in range(len(size)))


def collapsed(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Sizes and strides of as few dimensions as there can be, the innermost first."""
    # By the strides of what is written, which is there in full.
    order = sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: (strides[-1][d], -d))
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


def access_of(rows: tuple[int, ...], memory: Memory) -> Access:
    """rows: the strides of the collapsed dimensions."""
    unit = 16
    while any(stride % unit for stride in rows):
        unit //= 2
    lane = memory.strides[-1]
    moves = tuple(stride != 0 for stride in rows)
    return Access(moves, lane if lane in (0, 1, 2) else -1, unit, memory.period, memory.dtype)


def farthest(sizes: tuple[int, ...], strides: tuple[int, ...], memory: Memory, width: int) -> int:
    """How many elements from the first the last one may lie, past the ends of tiles too."""
    over = sum((size + 64) * stride for size, stride in zip(sizes, strides, strict=True))
    return over + (2 * width + 4096) * max(1, memory.strides[-1])


def tiled(program: RowProgram, sizes: tuple[int, ...], wide: bool) -> tuple[Tiling, int]:
    """How rows, of these sizes from the innermost out, are cut into programs, and how many programs that makes."""
    form = form_of(program)
    units = program.width if form == PLAIN else program.width // 2
    lanes_read = 2 if form == PAIRS else 1  # of a tile in memory to one of its units
    total = prod(sizes)
    if units * lanes_read <= WARP:
        return _short_rows(units, lanes_read, sizes, wide)
    if any(op.name in REDUCTIONS for op in program.ops):
        warps, parts = _long_row(units, WARP // lanes_read, 2 if form == HALVES else 1)
        return Tiling(1, True, 0, WARP // lanes_read * warps, parts, 1, wide, warps), total
    block = fullest(units, PARTS if form == PLAIN else PARTS[:-1])
    elements = block if form == PLAIN else 2 * block
    split = cdiv(units, block)
    return Tiling(1, True, 0, block, 1, split, wide, cdiv(elements, 32 * THREAD)), total * split


def _short_rows(units: int, lanes_read: int, sizes: tuple[int, ...], wide: bool) -> tuple[Tiling, int]:
    """Several rows to a tile: neighbors in the innermost dimension, if it has enough of them."""
    block, total = power_of_two(units), prod(sizes)
    most = ROWS * WARP // (block * lanes_read)
    choices = [1 << n for n in range(most.bit_length())]
    rows = fullest(sizes[0], choices)
    inner = len(sizes) == 1 or 4 * rows >= most
    if not inner:  # few rows side by side: tiles go on into the next ones
        rows = fullest(total, choices)
    programs = cdiv(sizes[0], rows) * (total // sizes[0]) if inner else cdiv(total, rows)
    side = sizes[0] if len(sizes) > 1 and sizes[0] <= MOST_HEADS else 0
    return Tiling(rows, inner, side, block, 1, 1, wide, max(1, rows * block * lanes_read // WARP)), programs


def _long_row(units: int, warp: int, tiles: int) -> tuple[int, int]:
    """How many warps hold a row, and in how many parts. warp: units of a part to each; tiles: to a part."""
    shapes = {}
    for warps in (1, 2, 4, 8, MOST_WARPS):
        parts = cdiv(units, warps * warp)
        if parts * tiles in TILES:
            shapes[warps, parts] = units / (warps * warp * parts)
    good = [shape for shape, full in shapes.items() if full >= FULL_ENOUGH * max(shapes.values())]
    return min(good, key=lambda shape: TILES.index(shape[1] * tiles))


def fullest(count: int, sizes: Sequence[int]) -> int:
    """The largest of the sizes that leaves few places empty where `count` things are put in boxes of it."""
    full = {size: count / (cdiv(count, size) * size) for size in sizes}
    return max(size for size in sizes if full[size] >= FULL_ENOUGH * max(full.values()))
