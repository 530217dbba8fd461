"""Few rows times a weight in blocks of few bits, on the tensor cores, as `skinny_mma_triton` has it.

Each warp takes sets of `units_triton`, and waits for no other warp. The four threads of a row have the scales of a
unit each, and hand them to one another: a scale multiplies the sums of a part.

Serves 2 to 16 rows in 16 bits, on compute capability 8.0 and later.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_gemv_mma_triton import sets_of
from accel_kernels.gemm.blocks.fragments.block_rows_triton import (
    banks,
    half_words,
    has_minimum,
    joined_words,
    loads_in_order,
    of_unit,
    part_scales,
    span_scales,
    sums_layout,
    write_sums,
)
from accel_kernels.gemm.blocks.fragments.unit_numbers_triton import pair_table
from accel_kernels.gemm.blocks.fragments.units_triton import (
    SET,
    SPAN,
    UNIT,
    high_bits,
    part_column,
    part_factor,
    slot_column,
    unit_factors,
    unit_parts,
)
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    places,
    scales_layout,
    words_layout,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


class BlockSkinnyTile(NamedTuple):
    """Rows of the weight to a program, warps, units loaded ahead, programs to a multiprocessor."""

    rows: int
    warps: int
    depth: int
    programs: int


@gluon.jit
def _of_unit(values, UNIT_AT: gl.constexpr, M: gl.constexpr, MMA: gl.constexpr):
    """(S, N, 4), of each unit, as this unit's for every row of x, (S, N, M)."""
    one = of_unit(values, UNIT_AT)
    wide = gl.join(one, one)
    if M == 16:
        wide = gl.join(wide, wide).permute((0, 1, 4, 2, 3))
    return gl.convert_layout(wide.reshape([values.shape[0], values.shape[1], M]), MMA)


@gluon.jit
def _x(x_ptr, turn, m, STEP: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, SOURCE: gl.constexpr,
       num_warps: gl.constexpr):  # fmt: skip
    """x of the parts of unit STEP of every warp's set."""
    COLUMNS: gl.constexpr = UNIT // unit_parts(SOURCE)
    share, row, slot = places(num_warps, BLOCK_M, COLUMNS, x_layout(num_warps, BLOCK_M, COLUMNS))
    column = slot_column(slot, SOURCE) + (turn * num_warps + share) * SET + STEP // 4 * SPAN
    found = ()
    for part in gl.static_range(unit_parts(SOURCE)):
        place = column + part_column(SOURCE, STEP % 4, part)
        found = found + (gl.load(x_ptr + row * K + place, mask=(row < m) & (place < K), other=0.0),)
    return found


@gluon.jit(do_not_specialize=("m",))
def block_skinny_mma_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
    GATE: gl.constexpr, WHOLE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    SETS: gl.constexpr = sets_of(K, num_warps)
    TILE: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    PARTS: gl.constexpr = unit_parts(SOURCE)
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALF: gl.constexpr = words_layout(num_warps, BLOCK_N // 2, 2)
    SCALES: gl.constexpr = scales_layout(num_warps, BLOCK_N)
    SUMS: gl.constexpr = sums_layout(num_warps, BLOCK_N, BLOCK_M, GATE)
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            half_words(
                weight, up, begin, blocks, 0, n, ahead, BLOCK_N, K, FORMAT, SOURCE, GATE, WHOLE, num_warps, HALF
            ),
        )
    held = span_scales(weight, up, begin, blocks, 0, n, BLOCK_N, K, FORMAT, SOURCE, GATE, WHOLE, num_warps, SCALES)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = banks(BLOCK_N, num_warps, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _x(x_ptr, 0, m, 0, K, BLOCK_M, SOURCE, num_warps)
    nothing = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc = nothing
    mine = (blocks - begin + stride - 1) // stride
    for turn in range(mine * SETS):
        block, set = begin + turn // SETS * stride, turn % SETS
        next_block, next_set = begin + (turn + 1) // SETS * stride, (turn + 1) % SETS
        high = 0
        for step in gl.static_range(8):
            if step % 4 == 0:
                scales = part_scales(held, weight, up, BLOCK_N, SOURCE, ZERO, GATE, num_warps, SCALES)
                if step == 0:
                    held = span_scales(weight, up, block, blocks, set * num_warps * 2 + 1, n, BLOCK_N, K, FORMAT,
                                       SOURCE, GATE, WHOLE, num_warps, SCALES)  # fmt: skip
                else:
                    held = span_scales(weight, up, next_block, blocks, next_set * num_warps * 2, n, BLOCK_N, K, FORMAT,
                                       SOURCE, GATE, WHOLE, num_warps, SCALES)  # fmt: skip
            this_x = x
            x = _x(x_ptr, set if step < 7 else next_set, m, (step + 1) % 8, K, BLOCK_M, SOURCE, num_warps)
            words = joined_words(ring[0])
            high = high_bits(words, high, step, SOURCE)
            left = unit_factors(words, high, table, bank, 0, step, DTYPE, FORMAT, SOURCE, False)
            for part in gl.static_range(PARTS):
                right = part_factor(this_x[part], SOURCE, RIGHT)
                acc += mma_v2(gl.convert_layout(left[part], LEFT), right, nothing) * _of_unit(
                    scales[part], step % 4, BLOCK_M, MMA
                )
                if has_minimum(SOURCE):
                    sums = column_sums(right, BLOCK_N, MMA, LEFT)
                    acc += sums * _of_unit(scales[PARTS + part], step % 4, BLOCK_M, MMA)
            ring = ring[1:] + (
                half_words(weight, up, block if step + DEPTH < 8 else next_block, blocks,
                           set if step + DEPTH < 8 else next_set, n, (step + DEPTH) % 8, BLOCK_N, K, FORMAT, SOURCE,
                           GATE, WHOLE, num_warps, HALF),
            )  # fmt: skip
            if step % 2 == 1:
                loads_in_order()
        if set == SETS - 1:
            y = gl.sum(gl.convert_layout(acc, SUMS), axis=0)
            write_sums(y, block * TILE, weight, up, after, y_ptr, m, n, GATE, ACTIVATION)
            acc = nothing


def block_skinny_tile(rows: int, n: int, k: int, gate: bool, processors: int) -> BlockSkinnyTile:
    """Counted, not measured."""
    return BlockSkinnyTile(32, 8, 4, 2)


def block_skinny_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `block_linear` returns into y."""
    n, k = weight.shape
    rows, up = x.numel() // k, epilogue.up
    gate = up is not None
    if norm is not None:
        x = apply_norm(x, norm)
    limit = 65536 // (32 * tile.warps * tile.programs)
    registers = {"maxnreg": limit} if limit < 255 else {}
    blocks = triton.cdiv(n, tile.rows // (1 + gate))
    launch(
        block_skinny_mma_kernel, (min(blocks, tile.programs * multiprocessors(x.device)),),
        x, BlockArguments.of(weight), BlockArguments.of(up if gate else weight), epilogue.arguments, y, rows, n,
        K=k, FORMAT=weight.format.name, SOURCE=weight.format.source, **epilogue.flags,
        WHOLE=n % (tile.rows // (1 + gate)) == 0, BLOCK_M=max(8, power_of_two(rows)), BLOCK_N=tile.rows,
        DEPTH=tile.depth, num_warps=tile.warps, **programmatic(x.device), **registers,
    )  # fmt: skip
