"""Few rows times a weight in blocks of few bits, on the tensor cores, as `skinny_mma_triton` has it.

Each warp takes sets of `units_triton`, and waits for no other warp. The four threads of a row have the scales of a
unit each, and hand them to one another: a scale multiplies the sums of a part. Of more than 16 rows neighboring
programs take 16 each times the same blocks, which so come from memory once.

Serves 2 to 64 rows in 16 bits.
"""

import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_gemv_mma_triton import banks, half_words, joined_words, sets_of
from accel_kernels.gemm.blocks.fragments.block_scales_triton import has_minimum, part_scales, span_scales
from accel_kernels.gemm.blocks.fragments.units_triton import (
    SET,
    SPAN,
    UNIT,
    high_bits,
    pair_table,
    part_column,
    part_factor,
    unit_factors,
    unit_parts,
)
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile
from accel_kernels.gemm.quantized.operands.mma_operands_triton import column_sums, places, x_layout
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@constexpr_function
def _shuffle(unit):
    return f"shfl.sync.idx.b32 $0, $1, {unit}, 0x1c03, -1;"


@gluon.jit
def _of_unit(values, UNIT_AT: gl.constexpr, M: gl.constexpr, MMA: gl.constexpr):
    """(S, N, 4), of each unit, as this unit's for every row of x, (S, N, M)."""
    S: gl.constexpr = values.shape[0]
    N: gl.constexpr = values.shape[1]
    TEXT: gl.constexpr = _shuffle(UNIT_AT)
    one = gl.inline_asm_elementwise(TEXT, "=f,f", [values], dtype=gl.float32, is_pure=True, pack=1)
    wide = gl.join(one, one)
    if M == 16:
        wide = gl.join(wide, wide).permute((0, 1, 4, 2, 3))
    return gl.convert_layout(wide.reshape([S, N, M]), MMA)


@gluon.jit
def _x(x_ptr, turn, m, STEP: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, SOURCE: gl.constexpr,
       num_warps: gl.constexpr):  # fmt: skip
    """x of the parts of unit STEP of every warp's set."""
    COLUMNS: gl.constexpr = UNIT // unit_parts(SOURCE)
    share, row, column = places(num_warps, BLOCK_M, COLUMNS, x_layout(num_warps, BLOCK_M, COLUMNS))
    column += (turn * num_warps + share) * SET + STEP // 4 * SPAN
    found = ()
    for part in gl.static_range(unit_parts(SOURCE)):
        place = column + part_column(SOURCE, STEP % 4, part)
        found = found + (gl.load(x_ptr + row * K + place, mask=(row < m) & (place < K), other=0.0),)
    return found


@gluon.jit(do_not_specialize=("m",))
def block_skinny_mma_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
    GATE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    SETS: gl.constexpr = sets_of(K, num_warps)
    TILE: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    PARTS: gl.constexpr = unit_parts(SOURCE)
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    blocks = (n + TILE - 1) // TILE
    shares = (m + BLOCK_M - 1) // BLOCK_M
    stride = gl.num_programs(0) // shares
    begin = gl.program_id(0) // shares
    x_first = gl.program_id(0) % shares * BLOCK_M
    x_ptr += x_first * K
    left_rows = m - x_first
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (half_words(weight, up, begin, blocks, 0, n, ahead, BLOCK_N, K, FORMAT, SOURCE, GATE, num_warps),)
    held = span_scales(weight, up, begin, blocks, 0, n, BLOCK_N, K, FORMAT, SOURCE, GATE, 2, num_warps)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = banks(BLOCK_N, num_warps)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _x(x_ptr, 0, left_rows, 0, K, BLOCK_M, SOURCE, num_warps)
    nothing = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc = nothing
    mine = (blocks - begin + stride - 1) // stride
    for turn in range(mine * SETS):
        block, set = begin + turn // SETS * stride, turn % SETS
        next_block, next_set = begin + (turn + 1) // SETS * stride, (turn + 1) % SETS
        high = 0
        for step in gl.static_range(8):
            if step % 4 == 0:
                scales = part_scales(held, weight, up, BLOCK_N, SOURCE, ZERO, GATE, num_warps)
                if step == 0:
                    held = span_scales(weight, up, block, blocks, set * num_warps * 2 + 1, n, BLOCK_N, K, FORMAT,
                                       SOURCE, GATE, 2, num_warps)  # fmt: skip
                else:
                    held = span_scales(weight, up, next_block, blocks, next_set * num_warps * 2, n, BLOCK_N, K, FORMAT,
                                       SOURCE, GATE, 2, num_warps)  # fmt: skip
            this_x = x
            x = _x(x_ptr, set if step < 7 else next_set, left_rows, (step + 1) % 8, K, BLOCK_M, SOURCE, num_warps)
            words = joined_words(ring[0])
            high = high_bits(words, high, step, SOURCE)
            left = unit_factors(words, high, table, bank, step, DTYPE, SOURCE)
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
                           GATE, num_warps),
            )  # fmt: skip
        if set == SETS - 1:
            y = gl.sum(acc, axis=0)
            if GATE:
                y, other = gl.split(y.reshape([TILE // 8, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
                y = gl.convert_layout(y.reshape([TILE, BLOCK_M]), OUT)
                other = gl.convert_layout(other.reshape([TILE, BLOCK_M]), OUT)
            else:
                y = gl.convert_layout(y, OUT)
                other = y
            write(y, other, block * TILE, x_first, weight, up, after, y_ptr, m, n, True, GATE, ACTIVATION, OUT)
            acc = nothing


def block_skinny_tile(rows: int, n: int, k: int, gate: bool, source: str, processors: int) -> GemvTile:
    """As measured on an H200. With the table of pairs, which launchers do not count, a program has at most 48 KB of
    shared memory: for more they would have to ask.
    """
    if rows <= 8:
        return GemvTile(8, 4, 2)
    return GemvTile(4, 4, 2, rows=32) if gate or n >= 40 * processors else GemvTile(8, 4, 1, rows=32)


def block_skinny_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y."""
    n, k = weight.shape
    rows, up = x.numel() // k, epilogue.up
    if norm is not None:
        x = apply_norm(x, norm)
    block_m = min(16, max(8, power_of_two(rows)))
    launch(
        block_skinny_mma_kernel, tile.grid(n, up is not None, x.device, triton.cdiv(rows, block_m)),
        x, BlockArguments.of(weight), BlockArguments.of(weight if up is None else up), epilogue.arguments, y, rows, n,
        K=k, FORMAT=weight.format.name, SOURCE=weight.format.source, **epilogue.flags,
        BLOCK_M=block_m, BLOCK_N=tile.rows, **tile.settings(x.device),
    )  # fmt: skip
