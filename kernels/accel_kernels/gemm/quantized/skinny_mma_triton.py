"""A weight of fewer bits times two rows to 64, its numbers from memory straight into the tensor cores' registers.

See `mma_operands_triton`. Each warp takes a share of the columns and waits for no other: nothing passes through shared
memory but the warps' sums.

Serves 2 to 64 rows in 16 bits, scales of their dtype, compute capability 8.0 and later, and on 9.0 what is too small
for `skinny_wgmma_triton`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.device import programmatic
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.quantized.operands.mma_operands_triton import (
    column_sums,
    places,
    scales_layout,
    squares_layout,
    weight_factor,
    words_layout,
    x_factor,
    x_layout,
)
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.gemm.quantized_weight import PackedWeight
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@gluon.jit
def _numbers(weight, place, inside, ZERO_POINT: gl.constexpr, SCALED: gl.constexpr):
    """Scales, and what is to be added to numbers, both in the dtype of the scales; 0 where there are none."""
    scales, zeros = 0, 0
    if SCALED:
        scales = gl.load(weight.scales + place, mask=inside, other=0.0)
    if weight.zeros is not None:
        zeros = -ZERO_POINT - gl.load(weight.zeros + place, mask=inside, other=0).to(gl.float32)
        zeros = zeros.to(weight.scales.dtype.element_ty)
    return scales, zeros


@gluon.jit
def _load(weight, up, w_at, w_block, g_at, g_column, BLOCKS: gl.constexpr, J: gl.constexpr, K: gl.constexpr,
          GROUPS: gl.constexpr, ZERO_POINT: gl.constexpr, GATE: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """(words, scales, zeros, the gate's other weight's words, scales, zeros) of a step."""
    w = gl.load(weight.words + w_at + w_block * 4 * J, mask=w_block < BLOCKS, other=0)
    place, inside = g_at + g_column // (K // GROUPS), g_column < K
    s, z = _numbers(weight, place, inside, ZERO_POINT, SCALED)
    u, t, v = w, s, z
    if GATE:
        u = gl.load(up.words + w_at + w_block * 4 * J, mask=w_block < BLOCKS, other=0)
        t, v = _numbers(up, place, inside, ZERO_POINT, SCALED)
    return w, s, z, u, t, v


@gluon.jit
def _load_x(x_ptr, norm, x_at, column, inside, K: gl.constexpr):
    x = gl.load(x_ptr + x_at + column, mask=inside & (column < K), other=0.0)
    nw = 0
    if norm.weight is not None:
        nw = gl.load(norm.weight + column, mask=column < K, other=0.0)
    return x, nw


@gluon.jit
def _product(acc, words, s, z, right, sums, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr,
             ZEROS: gl.constexpr, POST_SCALE: gl.constexpr, LEFT: gl.constexpr):  # fmt: skip
    """acc + weight times x. POST_SCALE: scales multiply the products, and zero points are taken off them."""
    if POST_SCALE:
        left = weight_factor(words, s, z, FORMAT, DTYPE, False, False, FORMAT == "int4", LEFT)
        part = mma_v2(left, right, gl.zeros_like(acc))
        if FORMAT == "int4":
            if ZEROS:
                part += gl.expand_dims(z.to(gl.float32), 2) * sums
            else:
                part -= zero_point(FORMAT, DTYPE) * sums
        elif ZEROS:
            part += gl.expand_dims(z.to(gl.float32), 2) * sums
        return acc + part * gl.expand_dims(s.to(gl.float32), 2)
    else:
        return mma_v2(weight_factor(words, s, z, FORMAT, DTYPE, SCALED, ZEROS, False, LEFT), right, acc)


@gluon.jit(do_not_specialize=("m",))
def skinny_mma_kernel(
    x_ptr, weight, up, norm, after, y_ptr, m, n,
    K: gl.constexpr, GROUPS: gl.constexpr, FORMAT: gl.constexpr, NORM: gl.constexpr, GATE: gl.constexpr,
    ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, J: gl.constexpr, DEPTH: gl.constexpr,
    X_DEPTH: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """NORM: "none", or "rms", which divides the sums: it is known when they are. J: words of a thread."""
    OWN: gl.constexpr = J * (8 if FORMAT == "int4" else 4)  # columns of a thread
    COLUMNS: gl.constexpr = 4 * OWN
    BLOCKS: gl.constexpr = K // COLUMNS
    STEPS: gl.constexpr = (BLOCKS + num_warps - 1) // num_warps
    ZEROS: gl.constexpr = weight.zeros is not None
    SCALED: gl.constexpr = GROUPS > 1 or FORMAT == "int4" or ZEROS
    POST_SCALE: gl.constexpr = SCALED and (K // GROUPS) % COLUMNS == 0  # a scale covers what is multiplied at a time
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    NEIGHBORS: gl.constexpr = FORMAT == "fp8" or DTYPE == gl.float16
    ZERO_POINT: gl.constexpr = zero_point(FORMAT, DTYPE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    W: gl.constexpr = words_layout(num_warps, BLOCK_N, J)
    X: gl.constexpr = x_layout(num_warps, BLOCK_M, COLUMNS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    first = gl.program_id(0) * BLOCK_N
    w_block, w_row, word = places(num_warps, BLOCK_N, 4 * J, W)
    w_at = gl.minimum(first + w_row, n - 1).to(gl.int64) * (BLOCKS * 4 * J) + word
    if POST_SCALE:
        g_column = gl.expand_dims(gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1)
        g_row = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0)
        g_column *= COLUMNS
    else:
        g_column, g_row, thread = places(num_warps, BLOCK_N, 4, scales_layout(num_warps, BLOCK_N))
        g_column = g_column * COLUMNS + thread * OWN
    g_at = gl.minimum(first + g_row, n - 1) * GROUPS
    x_share, x_row, column = places(num_warps, BLOCK_M, COLUMNS, X)
    x_column, x_mask = x_share * COLUMNS + column, x_row < m
    SPAN: gl.constexpr = COLUMNS * num_warps
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            _load(weight, up, w_at, w_block + ahead * num_warps, g_at, g_column + ahead * SPAN, BLOCKS, J, K, GROUPS,
                  ZERO_POINT, GATE, SCALED),
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    xs = ()
    for ahead in gl.static_range(X_DEPTH):
        xs = xs + (_load_x(x_ptr, norm, x_row * K, x_column + ahead * SPAN, x_mask, K),)
    acc = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc_u = acc
    squares = gl.zeros([num_warps, BLOCK_M, 4], gl.float32, gl.SliceLayout(3, squares_layout(num_warps, BLOCK_M, OWN)))
    for start in range(0, STEPS, DEPTH):
        for part in gl.static_range(DEPTH):
            step = start + part
            w, s, z, u, t, v = ring[0]
            x, nw = xs[0]
            if X_DEPTH > 1:
                more_x = _load_x(x_ptr, norm, x_row * K, x_column + (step + X_DEPTH) * SPAN, x_mask, K)
            if NORM == "rms":
                wide = x.to(gl.float32)
                squares += gl.sum((wide * wide).reshape([num_warps, BLOCK_M, 4, OWN]), axis=3)
                if norm.weight is not None:
                    x = (wide * (nw.to(gl.float32) + norm.offset)).to(DTYPE)
            right = x_factor(x, J, FORMAT, NEIGHBORS, RIGHT)
            sums = 0.0
            if POST_SCALE and (FORMAT == "int4" or ZEROS):
                sums = column_sums(right, BLOCK_N, MMA, LEFT)
            acc = _product(acc, w, s, z, right, sums, FORMAT, DTYPE, SCALED, ZEROS, POST_SCALE, LEFT)
            if GATE:
                acc_u = _product(acc_u, u, t, v, right, sums, FORMAT, DTYPE, SCALED, ZEROS, POST_SCALE, LEFT)
            more = _load(weight, up, w_at, w_block + (step + DEPTH) * num_warps, g_at,
                         g_column + (step + DEPTH) * SPAN, BLOCKS, J, K, GROUPS, ZERO_POINT, GATE, SCALED)  # fmt: skip
            if X_DEPTH == 1:
                more_x = _load_x(x_ptr, norm, x_row * K, x_column + (step + 1) * SPAN, x_mask, K)
            ring = ring[1:] + (more,)
            xs = xs[1:] + (more_x,)

    y = gl.convert_layout(gl.sum(acc, axis=0), OUT)
    other = y
    if GATE:
        other = gl.convert_layout(gl.sum(acc_u, axis=0), OUT)
    if NORM == "rms":
        mean = gl.convert_layout(gl.sum(gl.sum(squares, axis=2), axis=0), gl.SliceLayout(0, OUT)) / K
        rate = gl.expand_dims(gl.rsqrt(mean + norm.eps), 0)
        y, other = y * rate, other * rate
    write(y, other, first, 0, weight, up, after, y_ptr, m, n, SCALED, GATE, ACTIVATION, OUT)


class Tile(NamedTuple):
    """Rows of the weight to a program, warps, and how many steps ahead weights are read."""

    rows: int
    warps: int
    depth: int


def words(format: str, rows: int) -> int:
    """Of a thread: 16 bytes, 8 where x takes the registers."""
    return 2 if format == "int4" and rows > 16 else 4


def x_depth(rows: int) -> int:
    """How many steps ahead x is read: as far as registers hold it."""
    return 2 if rows <= 8 else 1


def columns(format: str, rows: int) -> int:
    """What K must be a multiple of."""
    return 4 * words(format, rows) * (8 if format == "int4" else 4)


def skinny_mma(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y."""
    n, k = weight.shape
    rows, format = x.numel() // k, weight.format.name
    inside = norm is not None and not norm.centered and norm.bias is None and x.dtype == torch.bfloat16 and rows <= 8
    if norm is not None and not inside:
        x, norm = apply_norm(x, norm), None
    before, kind = kernel_arguments(norm)
    launch(
        skinny_mma_kernel, (triton.cdiv(n, tile.rows),),
        x, PackedWeight.of(weight), PackedWeight.of(epilogue.up), before, epilogue.arguments, y, rows, n,
        K=k, GROUPS=weight.scales.shape[1], FORMAT=format, NORM=kind, **epilogue.flags,
        BLOCK_M=max(8, power_of_two(rows)), BLOCK_N=tile.rows, DEPTH=tile.depth, X_DEPTH=x_depth(rows),
        J=words(format, rows), num_warps=tile.warps, **programmatic(x.device),
    )  # fmt: skip
