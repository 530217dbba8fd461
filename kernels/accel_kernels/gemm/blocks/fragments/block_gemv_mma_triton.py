"""One row times a weight in blocks of few bits, on the tensor cores, as `gemv_mma_triton` has it.

The right factor's columns are the eight units of a set of x, see `units_triton`: a unit of the weight times all of
them gives one useful column, its own. So a thread has sums of whole units, and few scales to multiply them by. A warp
keeps its sets of x in registers for all blocks of the weight's rows.

Serves one row in 16 bits, on compute capability 9.0 and later. All else of one row takes `block_linear_triton`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_rows_triton import (
    banks,
    half_words,
    has_minimum,
    joined_words,
    loads_in_order,
    part_scales,
    rows_layout,
    set_scales,
    sums_layout,
    write_sums,
)
from accel_kernels.gemm.blocks.fragments.unit_numbers_triton import pair_table
from accel_kernels.gemm.blocks.fragments.units_triton import (
    SET,
    SPAN,
    UNIT,
    high_bits,
    part_factor,
    slot_column,
    unit_factors,
    unit_parts,
)
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.gemv_mma_triton import takes
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    places,
    scales_layout,
    steps,
    words_layout,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.warmup import launch


class BlockGemvTile(NamedTuple):
    """Warps of a program; units loaded ahead; programs to a multiprocessor; whether warps share columns, or rows."""

    warps: int
    depth: int
    programs: int
    split: bool = True


@constexpr_function
def sets_of(k, warps):
    """Sets of a warp: the first of every `warps` is the first warp's, and so on."""
    return -(-k // (512 * warps))


@constexpr_function
def columns_layout(shares, warps, columns):
    """(shares, 8, columns) of x, of each share's warp, or of all."""
    if shares > 1:
        return x_layout(shares, 8, columns)
    one = x_layout(1, 8, columns)
    nothing = [[0, 0, 0] for _ in steps(1, 0, 1, warps)]
    return gl.DistributedLinearLayout(list(one.reg_bases), list(one.lane_bases), nothing, [], [1, 8, columns])


@gluon.jit
def _x(ptr, set, K: gl.constexpr, SOURCE: gl.constexpr, S: gl.constexpr, layout: gl.constexpr):
    """Units of x of every warp's set, (S, 8, columns) of each part; rows 2 t and 2 t + 1 are unit t of either span."""
    COLUMNS: gl.constexpr = UNIT // unit_parts(SOURCE)
    share, row, slot = places(S, 8, COLUMNS, layout)
    span, unit = row % 2, row // 2
    first = (set * S + share) * SET + span * SPAN + slot_column(slot, SOURCE)
    found = ()
    for part in gl.static_range(unit_parts(SOURCE)):
        if SOURCE == "sixes":
            place = first + unit // 2 * 128 + unit % 2 * 32 + (part // 2 * 64 + part % 2 * 16)
        else:
            place = first + unit * UNIT + part * COLUMNS
        found = found + (gl.load(ptr + place, mask=place < K, other=0.0),)
    return found


@gluon.jit
def block_gemv_mma_kernel(
    x_ptr, weight, up, norm, after, y_ptr, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, WHOLE: gl.constexpr, ACTIVATION: gl.constexpr,
    S: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """S: shares of the columns, the number of warps or 1. NORM: "none", or "rms", which divides the sums."""
    SETS: gl.constexpr = sets_of(K, S)
    ROWS: gl.constexpr = 16 * num_warps // S
    TILE: gl.constexpr = ROWS // 2 if GATE else ROWS
    PARTS: gl.constexpr = unit_parts(SOURCE)
    COLUMNS: gl.constexpr = UNIT // PARTS
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, num_warps // S, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    X: gl.constexpr = columns_layout(S, num_warps, COLUMNS)
    HALF: gl.constexpr = words_layout(num_warps, 8, 2) if S > 1 else rows_layout(2, ROWS // 2, num_warps)
    SCALES: gl.constexpr = scales_layout(num_warps, 16) if S > 1 else rows_layout(1, ROWS, num_warps)
    SUMS: gl.constexpr = sums_layout(num_warps, 16, 1, GATE)
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            half_words(weight, up, begin, blocks, 0, n, ahead, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, S, HALF),
        )
    held = set_scales(weight, up, begin, blocks, 0, n, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, S, SCALES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = banks(ROWS, S, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _x(x_ptr, 0, K, SOURCE, S, X)
    nw = x
    if NORM == "rms" and norm.weight is not None:
        nw = _x(norm.weight, 0, K, SOURCE, S, X)
    squares = 0.0
    rate = 1.0
    if NORM == "rms":
        squares = _squares(x)
    if NORM == "rms" and SETS == 1:
        rate = _rate(squares, norm, K)
    right, sums = _factors(x, nw, norm, SOURCE, NORM, MMA, LEFT, RIGHT)
    # A thread has the sums of columns 2 t and 2 t + 1: of unit t of either span, as it has their scales.
    _, _, m_column = places(S, ROWS, 8, MMA)
    nothing = gl.zeros([S, ROWS, 8], gl.float32, MMA)
    total = nothing
    mine = (blocks - begin + stride - 1) // stride
    for turn in range(mine * SETS):
        block, set = begin + turn // SETS * stride, turn % SETS
        next_block, next_set = begin + (turn + 1) // SETS * stride, (turn + 1) % SETS
        if SETS > 1:
            right, sums = _factors(x, nw, norm, SOURCE, NORM, MMA, LEFT, RIGHT)
            x = _x(x_ptr, next_set, K, SOURCE, S, X)
            if NORM == "rms":
                squares += gl.where(turn + 1 < SETS, _squares(x), 0.0)
                if norm.weight is not None:
                    nw = _x(norm.weight, next_set, K, SOURCE, S, X)
        products = (nothing, nothing, nothing, nothing)[:PARTS]
        high = 0
        for step in gl.static_range(8):
            words = joined_words(ring[0])
            high = high_bits(words, high, step, SOURCE)
            left = unit_factors(words, high, table, bank, 0, step, DTYPE, FORMAT, SOURCE, False)
            for part in gl.static_range(PARTS):
                own = mma_v2(gl.convert_layout(left[part], LEFT), right[part], nothing)
                products = products[1:] + (gl.where(m_column == step % 4 * 2 + step // 4, own, products[0]),)
            ring = ring[1:] + (
                half_words(weight, up, block if step + DEPTH < 8 else next_block, blocks,
                           set if step + DEPTH < 8 else next_set, n, (step + DEPTH) % 8, ROWS, K, FORMAT, SOURCE, GATE,
                           WHOLE, S, HALF),
            )  # fmt: skip
            if step % 2 == 1:
                loads_in_order()
        even = part_scales(held[0], weight, up, ROWS, SOURCE, ZERO, GATE, S, SCALES)
        odd = part_scales(held[1], weight, up, ROWS, SOURCE, ZERO, GATE, S, SCALES)
        held = set_scales(weight, up, next_block, blocks, next_set, n, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, S,
                          SCALES)  # fmt: skip
        for part in gl.static_range(PARTS):
            total += products[part] * _of_both(even[part], odd[part], MMA)
            if has_minimum(SOURCE):
                total += gl.expand_dims(sums[part], 1) * _of_both(even[PARTS + part], odd[PARTS + part], MMA)
        if set == SETS - 1:
            y = gl.sum(total, axis=2)
            if S > 1:
                y = gl.sum(gl.convert_layout(y.reshape([S, 16, 1]), SUMS), axis=0)
            else:
                y = y.reshape([ROWS, 1])
            if NORM == "rms" and SETS > 1:
                rate = _rate(squares, norm, K)
            y *= rate
            write_sums(y, block * TILE, weight, up, after, y_ptr, 1, n, GATE, ACTIVATION)
            total = nothing


@gluon.jit
def _squares(x):
    """Sums of the squares of what a thread has of x."""
    total = gl.sum(x[0].to(gl.float32) * x[0].to(gl.float32), axis=2)
    for part in gl.static_range(1, len(x)):
        total += gl.sum(x[part].to(gl.float32) * x[part].to(gl.float32), axis=2)
    return total


@gluon.jit
def _rate(squares, norm, K: gl.constexpr):
    return gl.rsqrt(gl.sum(gl.sum(squares, axis=1), axis=0) / K + norm.eps)


@gluon.jit
def _factors(x, nw, norm, SOURCE: gl.constexpr, NORM: gl.constexpr, MMA: gl.constexpr, LEFT: gl.constexpr,
             RIGHT: gl.constexpr):  # fmt: skip
    """Right factors of a set's parts, times the norm's weight, and where they are needed the sums of their columns."""
    right = ()
    sums = ()
    for part in gl.static_range(len(x)):
        one = x[part]
        if NORM == "rms" and norm.weight is not None:
            one = (one.to(gl.float32) * (nw[part].to(gl.float32) + norm.offset)).to(one.dtype)
        right = right + (part_factor(one, SOURCE, RIGHT),)
        if has_minimum(SOURCE):
            sums = sums + (gl.max(column_sums(right[part], 16, MMA, LEFT), axis=1),)  # of equal rows
    return right, sums


@gluon.jit
def _of_both(even, odd, MMA: gl.constexpr):
    """(S, N, 4) of units of either span as (S, N, 8)."""
    return gl.convert_layout(gl.join(even, odd).reshape([even.shape[0], even.shape[1], 8]), MMA)


def block_gemv_tile(rows: int, n: int, k: int, gate: bool, processors: int) -> BlockGemvTile:
    """Counted, not measured."""
    return BlockGemvTile(8, 4, 2)


def block_gemv_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `block_linear` returns into y."""
    n, k = weight.shape
    up = epilogue.up
    gate = up is not None
    if norm is not None and not takes(norm, x.dtype):
        x, norm = apply_norm(x, norm), None
    before, kind = kernel_arguments(norm)
    limit = 65536 // (32 * tile.warps * tile.programs)
    registers = {"maxnreg": limit} if limit < 255 else {}
    rows = 16 if tile.split else 16 * tile.warps
    blocks = triton.cdiv(n, rows // (1 + gate))
    launch(
        block_gemv_mma_kernel, (min(blocks, tile.programs * multiprocessors(x.device)),),
        x, BlockArguments.of(weight), BlockArguments.of(up if gate else weight), before, epilogue.arguments, y, n,
        K=k, FORMAT=weight.format.name, SOURCE=weight.format.source, NORM=kind, **epilogue.flags,
        WHOLE=n % (rows // (1 + gate)) == 0, S=tile.warps if tile.split else 1, DEPTH=tile.depth,
        num_warps=tile.warps, **programmatic(x.device), **registers,
    )  # fmt: skip
