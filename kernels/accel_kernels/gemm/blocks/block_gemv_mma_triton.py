"""One row times a weight in blocks of few bits, on the tensor cores, as `gemv_mma_triton` has it.

The right factor's columns are eight units of x, see `fragments_triton`: a unit of the weight times all of them gives one
useful column, its own. So a thread has sums of whole units, and few scales to multiply them by. A set is eight units in
a row. A warp keeps its sets of x in registers for all blocks of the weight's rows.

Serves one row in 16 bits, on compute capability 9.0 and later. All else of one row takes `block_linear_triton`.
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
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments_triton import (
    UNIT,
    column_of,
    pair_table,
    unit_factors,
    unit_words,
    x_factors,
)
from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    of_either,
    places,
    scales_layout,
    squares_layout,
    words_layout,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.warmup import launch


class BlockGemvTile(NamedTuple):
    """Warps of a program, which share the columns; units loaded ahead; programs to a multiprocessor."""

    warps: int
    depth: int
    programs: int


@constexpr_function
def sets_of(k, warps):
    return -(-k // (512 * warps))


@gluon.jit
def _half(ptr, row, word, share, block, blocks, step, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
          TILE: gl.constexpr, FIRST: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Words of eight rows of a block, of every warp's unit `step`; 0 where there is nothing."""
    unit = (step // 8 * num_warps + share) * 8 + step % 8
    inside = (unit < K // UNIT) & (block < blocks)
    return unit_words(ptr, gl.minimum(block * TILE + FIRST + row, n - 1), unit, word, inside, K, FORMAT, SOURCE)


@gluon.jit
def _words(weight, up, row, word, share, block, blocks, step, n, K: gl.constexpr, FORMAT: gl.constexpr,
           SOURCE: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    T: gl.constexpr = 8 if GATE else 16
    low = _half(weight.data, row, word, share, block, blocks, step, n, K, FORMAT, SOURCE, T, 0, num_warps)
    high = _half(
        up.data, row, word, share, block, blocks, step, n, K, FORMAT, SOURCE, T, 0 if GATE else 8, num_warps
    )
    return low, high


@gluon.jit
def _joined(low, high):
    """Twice eight rows (warps, 8, words) as the sixteen of the left factor."""
    S: gl.constexpr = low.shape[0]
    return gl.join(low, high).permute((0, 3, 1, 2)).reshape([S, 16, low.shape[2]])


@gluon.jit
def _scales(weight, up, at, block, blocks, set, n, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr,
            GATE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """What scales of a set are made of, as it lies in memory. at: places in the layout of the sums, or of four blocks."""
    share, row, unit = at
    TILE: gl.constexpr = 8 if GATE else 16
    real = gl.minimum(block * TILE + (row % 8 if GATE else row), n - 1)
    upper = row >= 8
    if SOURCE == "table":
        unit += (set * num_warps + share) * 8
        inside = (unit < K // UNIT) & (block < blocks)
        at = (real * (K // 32) + unit * 2) >> weight.side.shift
        if weight.side.code2 is not None:
            held = of_either(weight.side.absmax, up.side.absmax, at, inside, upper, GATE)
            return held, of_either(weight.side.absmax2, up.side.absmax2, at >> 8, inside, upper, GATE)
        else:
            return (of_either(weight.side.absmax, up.side.absmax, at, inside, upper, GATE),)
    else:
        F: gl.constexpr = ggml_format(FORMAT)
        half = (set * num_warps + share) * 2 + unit // 2
        inside = (half < K // 256) & (block < blocks)
        place = real * (K // 256 * (F.bytes // 4)) + half * (F.bytes // 4)
        kind: gl.constexpr = gl.pointer_type(gl.int32)
        w, u = weight.data.to(kind), up.data.to(kind)
        return (
            of_either(w, u, place, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4 + 1, inside, upper, GATE),
            of_either(w, u, place + F.scales // 4 + 2, inside, upper, GATE),
        )


@gluon.jit
def _byte(words, AT: gl.constexpr):
    """Byte AT as a float32: in the fraction of 2^23."""
    return (((words >> (8 * AT)) & 255) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0


@gluon.jit
def _half_float(words, AT: gl.constexpr):
    return ((words >> (16 * AT)) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _pair(a, b, MMA: gl.constexpr):
    """(S, N, 4) of even and of odd units as (S, N, 8)."""
    return gl.convert_layout(gl.join(a, b).reshape([a.shape[0], a.shape[1], 8]), MMA)


@gluon.jit
def _scaled(products, held, sums, weight, up, at, FORMAT: gl.constexpr, SOURCE: gl.constexpr, ZERO: gl.constexpr,
            GATE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Products of raw numbers of a set's units, (S, N, 8), as those of values."""
    _, row, unit = at
    if SOURCE == "table":
        if weight.side.code2 is not None:
            scale = of_either(weight.side.code2, up.side.code2, held[0].to(gl.int32), True, row >= 8, GATE)
            shift = gl.load(weight.side.offset)
            if GATE:
                shift = gl.where(row >= 8, gl.load(up.side.offset), shift)
            return products[0] * (scale * held[1] + shift)
        else:
            return products[0] * held[0]
    else:
        later = unit % 2 == 1
        first, second, rest = held[1], held[2], held[3]
        s = gl.where(later, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030), first & 0x3F3F3F3F)
        m = gl.where(later, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030), second & 0x3F3F3F3F)
        d, least = _half_float(held[0], 0), _half_float(held[0], 1)
        total = gl.zeros_like(products[0])
        for part in gl.static_range(2):
            scale = _pair(d * _byte(s, part), d * _byte(s, part + 2), MMA)
            minimum = _pair(least * _byte(m, part), least * _byte(m, part + 2), MMA)
            total += (products[part] - ZERO * sums[part]) * scale - minimum * sums[part]
        return total


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
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALF: gl.constexpr = words_layout(num_warps, 8, 2)
    X: gl.constexpr = x_layout(num_warps, 8, UNIT)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    begin = gl.program_id(0)
    share, row, word = places(num_warps, 8, 8, HALF)
    m_share, m_row, m_unit = places(num_warps, 16, 8, MMA)
    at = m_share, m_row, m_unit
    if SOURCE != "table":
        at = places(num_warps, 16, 4, scales_layout(num_warps, 16))
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            _words(weight, up, row, word, share, begin + ahead // STEPS * stride, blocks, ahead % STEPS, n, K, FORMAT,
                   SOURCE, GATE, num_warps),
        )  # fmt: skip
    held = ()
    for set in gl.static_range(SETS):
        held = held + (_scales(weight, up, at, begin, blocks, set, n, K, FORMAT, SOURCE, GATE, num_warps),)
    table = 0
    bank = 0
    if SOURCE == "table":
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = (row * 16 + word // 2 * 4).broadcast_to([1, 8, 8]) + share * 0
        bank = _joined(bank, bank)
        if PDL:
            tl.extra.cuda.gdc_wait()
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_share, x_unit, slot = places(num_warps, 8, UNIT, X)
    right = ()
    sums = ()
    squares = gl.zeros([num_warps, 8, 4], gl.float32, gl.SliceLayout(3, squares_layout(num_warps, 8, 16)))
    for set in gl.static_range(SETS):
        place = (set * num_warps + x_share) * 512 + x_unit * UNIT + column_of(slot, SOURCE)
        x = gl.load(x_ptr + place, mask=place < K, other=0.0)
        if NORM == "rms":
            wide = x.to(gl.float32)
            squares += gl.sum((wide * wide).reshape([num_warps, 8, 4, 16]), axis=3)
            if norm.weight is not None:
                nw = gl.load(norm.weight + place, mask=place < K, other=0.0)
                x = (wide * (nw.to(gl.float32) + norm.offset)).to(DTYPE)
        factors = x_factors(x, SOURCE, RIGHT)
        right = right + (factors,)
        own = ()
        if SOURCE != "table":
            own = (column_sums(factors[0], 16, MMA, LEFT), column_sums(factors[1], 16, MMA, LEFT))
        sums = sums + (own,)
    rate = 1.0
    if NORM == "rms":
        rate = gl.rsqrt(gl.sum(gl.sum(gl.sum(squares, axis=2), axis=1), axis=0) / K + norm.eps)
    nothing = gl.zeros([num_warps, 16, 8], gl.float32, MMA)
    for block in range(begin, blocks, stride):
        total = nothing
        for set in gl.static_range(SETS):
            low, high = nothing, nothing
            for unit in gl.static_range(8):
                left = unit_factors(_joined(ring[0][0], ring[0][1]), table, bank, DTYPE, SOURCE, LEFT)
                low = gl.where(m_unit == unit, mma_v2(left[0], right[set][0], nothing), low)
                if SOURCE != "table":
                    high = gl.where(m_unit == unit, mma_v2(left[1], right[set][1], nothing), high)
                ring = ring[1:] + (
                    _words(weight, up, row, word, share, block + (set * 8 + unit + DEPTH) // STEPS * stride, blocks,
                           (set * 8 + unit + DEPTH) % STEPS, n, K, FORMAT, SOURCE, GATE, num_warps),
                )  # fmt: skip
            total += _scaled((low, high), held[0], sums[set], weight, up, at, FORMAT, SOURCE, ZERO, GATE, MMA)
            held = held[1:] + (
                _scales(weight, up, at, block + stride, blocks, set, n, K, FORMAT, SOURCE, GATE, num_warps),
            )
        y = gl.sum(gl.sum(total, axis=2), axis=0) * rate
        if GATE:
            y, other = gl.split(y.reshape([2, 8]).permute((1, 0)))
            y = gl.expand_dims(gl.convert_layout(y, gl.SliceLayout(1, OUT)), 1)
            other = gl.expand_dims(gl.convert_layout(other, gl.SliceLayout(1, OUT)), 1)
        else:
            y = gl.expand_dims(gl.convert_layout(y, gl.SliceLayout(1, OUT)), 1)
            other = y
        write(y, other, block * TILE, 0, weight, up, after, y_ptr, 1, n, True, GATE, ACTIVATION, OUT)


def takes(norm, dtype: torch.dtype) -> bool:
    """Whether the kernel computes this norm on the way: as of `gemv_mma`."""
    return not norm.centered and norm.bias is None and dtype == torch.bfloat16


def block_gemv_tile(n: int, k: int, gate: bool, processors: int) -> BlockGemvTile:
    """Counted, not measured."""
    return BlockGemvTile(16, 4, 1) if k > 4096 else BlockGemvTile(8, 4, 2)


def refusal(x, weight, up) -> str | None:
    """Why `block_gemv_mma` cannot take what `block_linear` supports."""
    n, k = weight.shape
    if not weight.format.source:
        return f"{weight.format.name}, not of units of {UNIT.value} columns"
    if x.numel() != k or x.dtype == torch.float32:
        return f"{x.numel() // k} rows of {x.dtype}"
    if k % 256 or n * k >= 1 << 31:
        return f"{n} x {k} numbers"
    if weight.format.source == "table" and weight.side.shift == 0:
        return "a scale to 32 columns"
    if any(t is not None and t.data_ptr() % 16 for t in (x, weight.data, up and up.data)):
        return "x or a weight not at a multiple of 16 bytes"
    return None


def block_gemv_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `block_linear` returns into y. Raises ValueError with `refusal`."""
    n, k = weight.shape
    up = epilogue.up
    reason = refusal(x, weight, up)
    if reason is not None:
        raise ValueError(reason)
    gate = up is not None
    if norm is not None and not takes(norm, x.dtype):
        x, norm = apply_norm(x, norm), None
    before, kind = kernel_arguments(norm)
    limit = 65536 // (32 * tile.warps * tile.programs)
    registers = {"maxnreg": limit} if limit < 255 else {}
    blocks = triton.cdiv(n, 8 if gate else 16)
    launch(
        block_gemv_mma_kernel, (min(blocks, tile.programs * multiprocessors(x.device)),),
        x, BlockArguments.of(weight), BlockArguments.of(up if gate else weight), before, epilogue.arguments, y, n,
        K=k, FORMAT=weight.format.name, SOURCE=weight.format.source, NORM=kind, **epilogue.flags, DEPTH=tile.depth,
        num_warps=tile.warps, **programmatic(x.device), **registers,
    )  # fmt: skip
