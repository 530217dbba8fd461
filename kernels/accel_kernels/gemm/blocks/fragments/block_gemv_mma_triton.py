"""One row times a weight in blocks of few bits, on the tensor cores, as `gemv_mma_triton` has it.

The right factor's columns are the eight units of a set of x, see `units_triton`: a unit of the weight times all of
them gives one useful column, its own. So a thread has sums of whole units, and few scales to multiply them by. A warp
keeps its sets of x in registers for all blocks of the weight's rows.

Serves one row in 16 bits. All else of one row takes `block_linear_triton`.
"""

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_scales_triton import has_minimum, part_scales, span_scales
from accel_kernels.gemm.blocks.fragments.units_triton import (
    SET,
    SPAN,
    UNIT,
    high_bits,
    pair_table,
    part_factor,
    unit_factors,
    unit_parts,
    unit_words,
)
from accel_kernels.gemm.quantized.gemv_mma_triton import GemvTile, launch_row
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    places,
    squares_layout,
    words_layout,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write_row


@constexpr_function
def sets_of(k, warps):
    """Sets of a warp: the first of every `warps` is the first warp's, and so on."""
    return -(-k // (512 * warps))


@gluon.jit
def half_words(weight, up, block, blocks, turn, n, STEP: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
               FORMAT: gl.constexpr, SOURCE: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Words of both halves of a block's rows, of unit STEP of every warp's set `turn`; 0 where there is nothing."""
    H: gl.constexpr = ROWS // 2
    share, row, word = places(num_warps, H, 8, words_layout(num_warps, H, 2))
    span = (turn * num_warps + share) * 2
    inside = (span + STEP // 4 < K // SPAN) & (block < blocks)
    if GATE:
        row = gl.minimum(block * H + row, n - 1).to(gl.int64)
        low = unit_words(weight.data, row, span, word, inside, STEP, K, FORMAT, SOURCE)
        return low, unit_words(up.data, row, span, word, inside, STEP, K, FORMAT, SOURCE)
    else:
        row = block * ROWS + row // 8 * 16 + row % 8
        low, high = gl.minimum(row, n - 1).to(gl.int64), gl.minimum(row + 8, n - 1).to(gl.int64)
        first = unit_words(weight.data, low, span, word, inside, STEP, K, FORMAT, SOURCE)
        return first, unit_words(weight.data, high, span, word, inside, STEP, K, FORMAT, SOURCE)


@gluon.jit
def joined_words(halves):
    """Twice (S, N / 2, words) as (S, N, words), eight rows of either in turns."""
    found = ()
    for at in gl.static_range(len(halves[0])):
        found = found + (_in_turns(halves[0][at], halves[1][at]),)
    return found


@gluon.jit
def _in_turns(low, high):
    S: gl.constexpr = low.shape[0]
    H: gl.constexpr = low.shape[1]
    W: gl.constexpr = low.shape[2]
    w = gl.join(low.reshape([S, H // 8, 8, W]), high.reshape([S, H // 8, 8, W]))
    return w.permute((0, 1, 4, 2, 3)).reshape([S, 2 * H, W])


@gluon.jit
def banks(ROWS: gl.constexpr, num_warps: gl.constexpr):
    """Where each thread's bank begins, in the shape of `joined_words` words."""
    H: gl.constexpr = ROWS // 2
    share, row, word = places(num_warps, H, 8, words_layout(num_warps, H, 2))
    bank = ((row % 8 * 16 + word // 2 * 4) + share * 0,)
    return joined_words((bank, bank))[0]


@gluon.jit
def block_gemv_mma_kernel(
    x_ptr, weight, up, norm, after, y_ptr, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """NORM: "none", or "rms", which divides the sums."""
    SETS: gl.constexpr = sets_of(K, num_warps)
    STEPS: gl.constexpr = SETS * 8
    TILE: gl.constexpr = 8 if GATE else 16
    PARTS: gl.constexpr = unit_parts(SOURCE)
    COLUMNS: gl.constexpr = UNIT // PARTS
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    X: gl.constexpr = x_layout(num_warps, 8, COLUMNS)
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            half_words(weight, up, begin + ahead // STEPS * stride, blocks, ahead % STEPS // 8, n, ahead % 8, 16, K,
                       FORMAT, SOURCE, GATE, num_warps),
        )  # fmt: skip
    held = ()
    for span in gl.static_range(2 * SETS):
        held = held + (
            span_scales(weight, up, begin, blocks, span // 2 * 2 * num_warps + span % 2, n, 16, K, FORMAT, SOURCE,
                        GATE, 2, num_warps),
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = banks(16, num_warps)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # A thread has the sums of columns 2 t and 2 t + 1: of unit t of either span, as it has their scales.
    _, _, m_column = places(num_warps, 16, 8, MMA)
    x_share, x_unit, column = places(num_warps, 8, COLUMNS, X)
    x_span, x_unit = x_unit % 2, x_unit // 2
    right = ()
    sums = ()
    squares = gl.zeros([num_warps, 8, 4], gl.float32, gl.SliceLayout(3, squares_layout(num_warps, 8, COLUMNS // 4)))
    for set in gl.static_range(SETS):
        factors = ()
        own = ()
        for part in gl.static_range(PARTS):
            place = (set * num_warps + x_share) * SET + x_span * SPAN + column
            if SOURCE == "sixes":
                place += x_unit // 2 * 128 + x_unit % 2 * 32 + (part // 2 * 64 + part % 2 * 16)
            else:
                place += x_unit * UNIT + part * COLUMNS
            x = gl.load(x_ptr + place, mask=place < K, other=0.0)
            if NORM == "rms":
                wide = x.to(gl.float32)
                squares += gl.sum((wide * wide).reshape([num_warps, 8, 4, COLUMNS // 4]), axis=3)
                if norm.weight is not None:
                    nw = gl.load(norm.weight + place, mask=place < K, other=0.0)
                    x = (wide * (nw.to(gl.float32) + norm.offset)).to(DTYPE)
            factors = factors + (part_factor(x, SOURCE, RIGHT),)
            if has_minimum(SOURCE):
                own = own + (column_sums(factors[part], 16, MMA, LEFT),)
        right = right + (factors,)
        sums = sums + (own,)
    rate = 1.0
    if NORM == "rms":
        rate = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, axis=2), axis=1), axis=0) / K + norm.eps)
    nothing = gl.zeros([num_warps, 16, 8], gl.float32, MMA)
    for block in range(begin, blocks, stride):
        total = nothing
        for set in gl.static_range(SETS):
            products = (nothing, nothing, nothing, nothing)[:PARTS]
            high = 0
            for step in gl.static_range(8):
                words = joined_words(ring[0])
                high = high_bits(words, high, step, SOURCE)
                left = unit_factors(words, high, table, bank, step, DTYPE, SOURCE)
                for part in gl.static_range(PARTS):
                    one = gl.where(
                        m_column == step % 4 * 2 + step // 4,
                        mma_v2(gl.convert_layout(left[part], LEFT), right[set][part], nothing),
                        products[0],
                    )
                    products = products[1:] + (one,)
                ring = ring[1:] + (
                    half_words(weight, up, block + (set * 8 + step + DEPTH) // STEPS * stride, blocks,
                               (set * 8 + step + DEPTH) % STEPS // 8, n, (step + DEPTH) % 8, 16, K, FORMAT, SOURCE,
                               GATE, num_warps),
                )  # fmt: skip
            even = part_scales(held[0], weight, up, 16, SOURCE, ZERO, GATE, num_warps)
            odd = part_scales(held[1], weight, up, 16, SOURCE, ZERO, GATE, num_warps)
            for part in gl.static_range(PARTS):
                total += products[part] * _of_both(even[part], odd[part], MMA)
                if has_minimum(SOURCE):
                    total += sums[set][part] * _of_both(even[PARTS + part], odd[PARTS + part], MMA)
            later = ()
            for span in gl.static_range(2):
                later = later + (
                    span_scales(weight, up, block + stride, blocks, set * 2 * num_warps + span, n, 16, K, FORMAT,
                                SOURCE, GATE, 2, num_warps),
                )  # fmt: skip
            held = held[2:] + later
        y = gl.sum(gl.sum(total, axis=2), axis=0) * rate
        write_row(y, block, weight, up, after, y_ptr, n, GATE, ACTIVATION, num_warps)


@gluon.jit
def _of_both(even, odd, MMA: gl.constexpr):
    """(S, N, 4) of units of either span as (S, N, 8)."""
    return gl.convert_layout(gl.join(even, odd).reshape([even.shape[0], even.shape[1], 8]), MMA)


def block_gemv_tile(rows: int, n: int, k: int, gate: bool, source: str, processors: int) -> GemvTile:
    """As measured on an H200, with 4096 and 14,336 columns."""
    if k > 4096:
        return GemvTile(16, 4, 1) if source == "table" else GemvTile(8, 8, 1)
    return GemvTile(8, 8 if source == "sixes" and not gate else 4, 2)


def block_gemv_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y."""
    format = {"FORMAT": weight.format.name, "SOURCE": weight.format.source}
    launch_row(block_gemv_mma_kernel, BlockArguments, x, weight, norm, epilogue, tile, y, **format)
