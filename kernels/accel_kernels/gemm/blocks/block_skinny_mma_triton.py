"""Few rows times a weight in blocks of few bits, on the tensor cores, as `skinny_mma_triton` has it.

Each warp takes spans of 256 columns, four units of `fragments_triton`, and waits for no other warp. The four threads of
a row have the scales of a unit each, and hand them to one another: a scale multiplies the sums of its unit.

Serves 2 to 16 rows in 16 bits, on compute capability 8.0 and later.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.blocks.block_gemv_mma_triton import _byte, _half_float
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments_triton import (
    UNIT,
    pair_table,
    parts_of,
    unit_factors,
    unit_words,
    x_factor,
)
from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    of_either,
    places,
    scales_layout,
    words_layout,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

MOST_SKINNY_ROWS = 16


class BlockSkinnyTile(NamedTuple):
    """Rows of the weight to a program, warps, units loaded ahead, programs to a multiprocessor."""

    rows: int
    warps: int
    depth: int
    programs: int


@gluon.jit
def _half(ptr, row, word, share, block, step, unit, blocks, n, K: gl.constexpr, FORMAT: gl.constexpr,
          SOURCE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    span = step * num_warps + share
    inside = (span < K // 256) & (block < blocks)
    return unit_words(ptr, gl.minimum(block * TILE + row, n - 1), span * 4 + unit, word, inside, K, FORMAT, SOURCE)


@gluon.jit
def _joined(low, high):
    """Twice (S, N / 2, words) as (S, N, words), eight rows of either in turns."""
    S: gl.constexpr = low.shape[0]
    H: gl.constexpr = low.shape[1]
    W: gl.constexpr = low.shape[2]
    w = gl.join(low.reshape([S, H // 8, 8, W]), high.reshape([S, H // 8, 8, W]))
    return w.permute((0, 1, 4, 2, 3)).reshape([S, 2 * H, W])


@gluon.jit
def _scales(weight, up, at, block, step, blocks, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
            GATE: gl.constexpr, TILE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """What a span's scales are made of, as it lies in memory, (S, N, 4)."""
    share, row, unit = at
    upper = row % 16 >= 8
    real = gl.minimum(block * TILE + (row // 16 * 8 + row % 8 if GATE else row), n - 1)
    span = step * num_warps + share
    inside = (span < K // 256) & (block < blocks)
    if SOURCE == "table":
        place = (real * (K // 32) + span * 8 + unit * 2) >> weight.side.shift
        held = of_either(weight.side.absmax, up.side.absmax, place, inside, upper, GATE)
        if weight.side.code2 is not None:
            return held, of_either(weight.side.absmax2, up.side.absmax2, place >> 8, inside, upper, GATE)
        else:
            return (held,)
    else:
        F: gl.constexpr = ggml_format(FORMAT)
        place = (real * (K // 256) + span) * (F.bytes // 4) + unit * 0
        kind: gl.constexpr = gl.pointer_type(gl.int32)
        w, u = weight.data.to(kind), up.data.to(kind)
        return (
            of_either(w, u, place, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4 + 1, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4 + 2, inside, upper, GATE),
        )


@gluon.jit
def _ready(held, weight, up, at, SOURCE: gl.constexpr, ZERO: gl.constexpr, GATE: gl.constexpr):
    """Of each thread's unit: its scale; or of two groups the scale, and what a sum of x is multiplied by."""
    _, row, unit = at
    if SOURCE == "table":
        if weight.side.code2 is not None:
            upper = row % 16 >= 8
            scale = of_either(weight.side.code2, up.side.code2, held[0].to(gl.int32), True, upper, GATE)
            shift = gl.load(weight.side.offset)
            if GATE:
                shift = gl.where(upper, gl.load(up.side.offset), shift)
            return (scale * held[1] + shift,)
        else:
            return held
    else:
        first, second, rest = held[1], held[2], held[3]
        s = gl.where(unit >= 2, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030), first & 0x3F3F3F3F)
        m = gl.where(unit >= 2, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030), second & 0x3F3F3F3F)
        s, m = s >> (unit % 2 * 16), m >> (unit % 2 * 16)
        d, least = _half_float(held[0], 0), _half_float(held[0], 1)
        a, b = d * _byte(s, 0), d * _byte(s, 1)
        return a, a * -ZERO - least * _byte(m, 0), b, b * -ZERO - least * _byte(m, 1)


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
def _x(x_ptr, row, slot, share, step, unit, m, K: gl.constexpr, PARTS: gl.constexpr, num_warps: gl.constexpr):
    """x of a unit's products."""
    found = ()
    for part in gl.static_range(PARTS):
        column = (step * num_warps + share) * 256 + unit * UNIT + part * (UNIT // PARTS) + slot
        found = found + (gl.load(x_ptr + row * K + column, mask=(row < m) & (column < K), other=0.0),)
    return found


@gluon.jit(do_not_specialize=("m",))
def block_skinny_mma_kernel(
    x_ptr, weight, up, after, y_ptr, m, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
    GATE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DEPTH: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = (K // 256 + num_warps - 1) // num_warps
    TILE: gl.constexpr = BLOCK_N // 2 if GATE else BLOCK_N
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALF: gl.constexpr = words_layout(num_warps, BLOCK_N // 2, 2)
    PARTS: gl.constexpr = parts_of(SOURCE)
    X: gl.constexpr = x_layout(num_warps, BLOCK_M, UNIT // PARTS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    share, half_row, word = places(num_warps, BLOCK_N // 2, 8, HALF)
    low_row, high_row = half_row, half_row
    if not GATE:
        low_row = half_row // 8 * 16 + half_row % 8
        high_row = low_row + 8
    at = places(num_warps, BLOCK_N, 4, scales_layout(num_warps, BLOCK_N))
    x_share, x_row, slot = places(num_warps, BLOCK_M, UNIT // PARTS, X)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        block, step = begin + ahead // 4 // STEPS * stride, ahead // 4 % STEPS
        ring = ring + (
            (_half(weight.data, low_row, word, share, block, step, ahead % 4, blocks, n, K, FORMAT, SOURCE, TILE,
                   num_warps),
             _half(up.data, high_row, word, share, block, step, ahead % 4, blocks, n, K, FORMAT, SOURCE, TILE,
                   num_warps)),
        )  # fmt: skip
    held = _scales(weight, up, at, begin, 0, blocks, n, K, FORMAT, SOURCE, GATE, TILE, num_warps)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = (half_row % 8 * 16 + word // 2 * 4).broadcast_to([1, BLOCK_N // 2, 8]) + share * 0
        bank = _joined(bank, bank)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = _x(x_ptr, x_row, slot, x_share, 0, 0, m, K, PARTS, num_warps)
    nothing = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc = nothing
    mine = (blocks - begin + stride - 1) // stride
    for turn in range(mine * STEPS):
        block, step = begin + turn // STEPS * stride, turn % STEPS
        scales = _ready(held, weight, up, at, SOURCE, ZERO, GATE)
        next_block, next_step = begin + (turn + 1) // STEPS * stride, (turn + 1) % STEPS
        held = _scales(weight, up, at, next_block, next_step, blocks, n, K, FORMAT, SOURCE, GATE, TILE, num_warps)
        for unit in gl.static_range(4):
            this_x = x
            x = _x(x_ptr, x_row, slot, x_share, step if unit < 3 else next_step, (unit + 1) % 4, m, K, PARTS,
                   num_warps)  # fmt: skip
            left = unit_factors(_joined(ring[0][0], ring[0][1]), table, bank, DTYPE, SOURCE, LEFT)
            for part in gl.static_range(len(left)):
                right = x_factor(this_x[part], SOURCE, RIGHT)
                acc += mma_v2(left[part], right, nothing) * _of_unit(scales[2 * part], unit, BLOCK_M, MMA)
                if SOURCE != "table":
                    sums = column_sums(right, BLOCK_N, MMA, LEFT)
                    acc += sums * _of_unit(scales[2 * part + 1], unit, BLOCK_M, MMA)
            later = turn + (unit + DEPTH) // 4
            block_of, step_of = begin + later // STEPS * stride, later % STEPS
            ring = ring[1:] + (
                (_half(weight.data, low_row, word, share, block_of, step_of, (unit + DEPTH) % 4, blocks, n, K, FORMAT,
                       SOURCE, TILE, num_warps),
                 _half(up.data, high_row, word, share, block_of, step_of, (unit + DEPTH) % 4, blocks, n, K, FORMAT,
                       SOURCE, TILE, num_warps)),
            )  # fmt: skip
        if step == STEPS - 1:
            y = gl.sum(acc, axis=0)
            if GATE:
                y, other = gl.split(y.reshape([TILE // 8, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
                y = gl.convert_layout(y.reshape([TILE, BLOCK_M]), OUT)
                other = gl.convert_layout(other.reshape([TILE, BLOCK_M]), OUT)
            else:
                y = gl.convert_layout(y, OUT)
                other = y
            write(y, other, block * TILE, 0, weight, up, after, y_ptr, m, n, True, GATE, ACTIVATION, OUT)
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
        BLOCK_M=max(8, power_of_two(rows)), BLOCK_N=tile.rows, DEPTH=tile.depth, num_warps=tile.warps,
        **programmatic(x.device), **registers,
    )  # fmt: skip
