"""One row times a 4-bit weight, on the tensor cores: fewer instructions than there are numbers.

See `mma_operands_triton`: numbers go from memory straight into the left factor. The right factor has eight columns, and
x is one row. So x is cut into spans: as many columns as four threads read of a row of the weight at a time. The right
factor's columns are eight spans of x. A span of the weight times all of them gives one useful column, its own. The
useful columns of eight products are put together and scaled at once, since one scale covers a span. Where several
scales cover a span, it has a column for each, with zeros elsewhere. The zero point is taken off with the scales, by
sums of x. So a warp keeps its part of x in a few registers for all blocks of the weight's rows.

A block is 16 rows: two times eight neighbors of the weight, or eight of it and the same of its gate's, of which a
thread has what belongs together.

Serves one row in 16 bits, bfloat16 where a norm comes first, times 4 bits in groups of 64 or more. It needs compute
capability 8.0 and weights of more than five million numbers. All else of one row takes `gemv_triton`.
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
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    of_either,
    places,
    weight_factor,
    words_layout,
    x_factor,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write_row
from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.warmup import launch


class GemvTile(NamedTuple):
    """Warps of a program, which share the columns; spans or units of the weight loaded ahead; programs to a
    multiprocessor, which take blocks of the weight in turns; rows of a block, its gate's among them.
    """

    warps: int
    depth: int
    programs: int
    rows: int = 16

    def settings(self, device) -> dict:
        """Of a launch: as many registers to a thread as so many programs leave it."""
        limit = 65536 // (32 * self.warps * self.programs)
        registers = {"maxnreg": limit} if limit < 255 else {}
        return {"DEPTH": self.depth, "num_warps": self.warps, **programmatic(device), **registers}

    def grid(self, n: int, gate: bool, device, shares: int = 1) -> tuple[int]:
        """shares: programs to a block, each with rows of x of its own."""
        most = max(1, self.programs * multiprocessors(device) // shares)
        return (min(triton.cdiv(n, self.rows // (1 + gate)), most) * shares,)


COLUMNS = gl.constexpr(128)  # of a span: 16 bytes of each of four threads


@constexpr_function
def steps_of(k, warps):
    """Spans of a warp: the first of every `warps` is the first warp's, and so on."""
    return -(-k // (128 * warps))


@constexpr_function
def whole(k):
    """What holds a row."""
    return 1 << (k - 1).bit_length()


@constexpr_function
def parts_of(k, groups):
    """Columns of the right factor that a span takes: one for each scale."""
    return max(1, 128 * groups // k)


@gluon.jit
def _half(ptr, row, at, block, blocks, step, share, n, K: gl.constexpr, TILE: gl.constexpr,
          FIRST: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Words of eight rows of a block, in every warp's span `step`; 0 where there is nothing."""
    span = step * num_warps + share
    place = gl.minimum(block * TILE + FIRST + row, n - 1).to(gl.int64) * (K // 8) + (at + step * num_warps * 16)
    inside = (span < K // COLUMNS) & (block < blocks)
    return gl.load(ptr + place, mask=inside, other=0, eviction_policy="evict_first")


@gluon.jit
def _joined(low, high):
    """Twice eight rows (warps, 8, columns) as the sixteen of the left factor."""
    S: gl.constexpr = low.shape[0]
    return gl.join(low, high).permute((0, 3, 1, 2)).reshape([S, 16, low.shape[2]])


@gluon.jit
def _words(weight, up, row, at, block, blocks, step, share, n, K: gl.constexpr, GATE: gl.constexpr,
           num_warps: gl.constexpr):  # fmt: skip
    TILE: gl.constexpr = 8 if GATE else 16
    low = _half(weight.words, row, at, block, blocks, step, share, n, K, TILE, 0, num_warps)
    high = _half(up.words, row, at, block, blocks, step, share, n, K, TILE, 0 if GATE else 8, num_warps)
    return low, high


@gluon.jit
def _scales(weight, up, row, column, block, blocks, n, K: gl.constexpr, GROUPS: gl.constexpr, GATE: gl.constexpr):
    """Scales and zeros (warps, 16, 8), of the block's rows, for what begins at these columns."""
    TILE: gl.constexpr = 8 if GATE else 16
    group = column // (K // GROUPS)
    inside = (column < K) & (block < blocks)
    place = gl.minimum(block * TILE + (row % 8 if GATE else row), n - 1) * GROUPS + group
    s = of_either(weight.scales, up.scales, place, inside, row >= 8, GATE)
    z = s
    if weight.zeros is not None:
        z = of_either(weight.zeros, up.zeros, place, inside, row >= 8, GATE)
    return s, z


@gluon.jit
def _scaled(products, s, z, sums, ZERO_POINT: gl.constexpr, ZEROS: gl.constexpr):
    """Products of raw numbers, less the zero point times the sums of x, times their scales."""
    if ZEROS:
        products -= (z.to(gl.float32) + ZERO_POINT) * sums
    else:
        products -= sums * ZERO_POINT
    return products * s.to(gl.float32)


@gluon.jit
def gemv_mma_kernel(
    x_ptr, weight, up, norm, after, y_ptr, n, K: gl.constexpr, GROUPS: gl.constexpr, NORM: gl.constexpr,
    GATE: gl.constexpr, ACTIVATION: gl.constexpr, DEPTH: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """NORM: "none", or "rms", which divides the sums. All of a warp's spans fit one right factor."""
    STEPS: gl.constexpr = steps_of(K, num_warps)
    PARTS: gl.constexpr = parts_of(K, GROUPS)
    gl.static_assert(STEPS * PARTS <= 8)
    TILE: gl.constexpr = 8 if GATE else 16
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    ZERO_POINT: gl.constexpr = zero_point("int4", DTYPE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALF: gl.constexpr = words_layout(num_warps, 8, 4)
    X: gl.constexpr = x_layout(num_warps, 8, COLUMNS)
    blocks = (n + TILE - 1) // TILE
    stride = gl.num_programs(0)
    first = gl.program_id(0)
    share, row, word = places(num_warps, 8, 16, HALF)
    at = share * 16 + word
    s_share, s_row, s_place = places(num_warps, 16, 8, MMA)
    s_column = (s_place // PARTS * num_warps + s_share) * COLUMNS + s_place % PARTS * (COLUMNS // PARTS)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            _words(weight, up, row, at, first + ahead // STEPS * stride, blocks, ahead % STEPS, share, n, K, GATE,
                   num_warps),
        )  # fmt: skip
    s, z = _scales(weight, up, s_row, s_column, first, blocks, n, K, GROUPS, GATE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    x_share, x_row, column = places(num_warps, 8, COLUMNS, X)
    place = (x_row // PARTS * num_warps + x_share) * COLUMNS + column
    inside = (column // (COLUMNS // PARTS) == x_row % PARTS) & (place < K)
    if weight.order is not None:  # a program reads x as it lies, and puts it in order in shared memory
        source = gl.load(weight.order + place, mask=inside, other=0).reshape([num_warps * 8 * COLUMNS])
        place = gl.arange(0, whole(K), layout=gl.BlockedLayout([8], [32], [num_warps], [0]))
        taken = place < K
    else:
        taken = inside
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = gl.load(x_ptr + place, mask=taken, other=0.0)
    rate = 1.0
    if NORM == "rms":
        wide = x.to(gl.float32)
        if weight.order is not None:
            squares = wide * wide
        else:
            squares = gl.sum((wide * wide).reshape([num_warps, 8, 4, 32]), axis=3)
            squares = gl.sum(gl.sum(squares, axis=2), axis=1)
        rate = gl.rsqrt(gl.sum(squares, axis=0) / K + norm.eps)
        if norm.weight is not None:
            nw = gl.load(norm.weight + place, mask=taken, other=0.0)
            x = (wide * (nw.to(gl.float32) + norm.offset)).to(DTYPE)
    if weight.order is not None:
        x = gl.gather(x, source, 0).reshape([num_warps, 8, COLUMNS])
        x = gl.where(inside, gl.convert_layout(x, X), 0.0)
    right = x_factor(x, 4, "int4", False, RIGHT)
    sums = column_sums(right, 16, MMA, LEFT)
    nothing = gl.zeros([num_warps, 16, 8], gl.float32, MMA)
    for block in range(first, blocks, stride):
        products = nothing
        for step in gl.static_range(STEPS):
            left = weight_factor(_joined(ring[0][0], ring[0][1]), 0, 0, "int4", DTYPE, False, False, True, LEFT)
            products = gl.where(s_place // PARTS == step, mma_v2(left, right, nothing), products)
            ring = ring[1:] + (
                _words(weight, up, row, at, block + (step + DEPTH) // STEPS * stride, blocks, (step + DEPTH) % STEPS,
                       share, n, K, GATE, num_warps),
            )  # fmt: skip
        total = _scaled(products, s, z, sums, ZERO_POINT, weight.zeros is not None)
        s, z = _scales(weight, up, s_row, s_column, block + stride, blocks, n, K, GROUPS, GATE)
        y = gl.sum(gl.sum(total, axis=2), axis=0) * rate
        write_row(y, block, weight, up, after, y_ptr, n, GATE, ACTIVATION, num_warps)


def takes(norm, dtype: torch.dtype) -> bool:
    """Whether the kernel computes this norm on the way: its factor of the whole row comes last, and without it float16
    may not hold the rest.
    """
    return not norm.centered and norm.bias is None and dtype == torch.bfloat16


def gemv_tile(n: int, k: int, group: int, gate: bool, processors: int, ordered: bool = False) -> GemvTile | None:
    """As measured on an H200: 16 warps to a multiprocessor, in as many programs as there are blocks for, at most two
    where each has to put x in order; None where no program's warps hold x in one factor each.
    """
    blocks = triton.cdiv(n, 8 if gate else 16)
    for warps in (8, 16) if ordered else (4, 8, 16):
        enough = warps == 16 or blocks > 16 // warps // 2 * processors
        if enough and steps_of(k, warps) * parts_of(k, k // group) <= 8:
            return GemvTile(warps, 4, 16 // warps)
    return None


def refusal(x, weight, up) -> str | None:
    """Why `gemv_mma` cannot take what `quantized_linear` supports."""
    n, k = weight.shape
    if weight.format.name != "int4":
        return "not of 4 bits"
    if x.numel() != k:
        return f"{x.numel() // k} rows"
    if k % 128 or weight.group % 32 or (weight.group % 128 and 128 % weight.group):
        return f"{k} columns, a scale to {weight.group}, which spans of 128 do not fit"
    if weight.scales.dtype != x.dtype or (up is not None and up.scales.dtype != x.dtype):
        return f"scales of {weight.scales.dtype} before a product of {x.dtype}"
    if any(t is not None and t.data_ptr() % 16 for t in (x, weight.data, up and up.data)):
        return "x or a weight not at a multiple of 16 bytes"
    return None


def gemv_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y. Raises ValueError for a tile whose warps have more spans than
    one factor holds, or with `refusal`.
    """
    n, k = weight.shape
    spans, parts = steps_of(k, tile.warps), parts_of(k, weight.scales.shape[1])
    reason = refusal(x, weight, epilogue.up)
    if reason is None and spans * parts > 8:
        reason = f"{tile.warps} warps to {k} columns: {spans} spans of {parts} scales each, more than 8"
    if reason is not None:
        raise ValueError(reason)
    launch_row(gemv_mma_kernel, PackedWeight, x, weight, norm, epilogue, tile, y, GROUPS=weight.scales.shape[1])


def launch_row(kernel, arguments, x, weight, norm, epilogue, tile, y, **constants):
    """Launches a kernel of one row. arguments: makes what it is given of a weight."""
    if norm is not None and not takes(norm, x.dtype):
        x, norm = apply_norm(x, norm), None
    before, kind = kernel_arguments(norm)
    (n, k), up = weight.shape, epilogue.up
    launch(
        kernel, tile.grid(n, up is not None, x.device),
        x, arguments.of(weight), arguments.of(weight if up is None else up), before, epilogue.arguments, y, n,
        K=k, NORM=kind, **epilogue.flags, **constants, **tile.settings(x.device),
    )  # fmt: skip
