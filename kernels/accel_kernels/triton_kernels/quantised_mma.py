"""A weight of fewer bits times one row to 64, its numbers from memory straight into the tensor cores' registers.

Of a 16 x 16 factor of mma.m16n8k16 a thread holds rows g and g + 8 and four columns. In a sum over columns their order
does not matter as long as both factors have the same: so each thread reads 16 bytes in a row of the weight, and what
these stand for are its columns of several instructions. x is read in that order too. Nothing passes through shared
memory but the warps' sums: each warp takes a share of the columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.activations import activate
from accel_kernels.triton_kernels.dependents import programmatic
from accel_kernels.triton_kernels.launch import power_of_two
from accel_kernels.triton_kernels.pairs import pairs
from accel_kernels.triton_kernels.projection import apply_norm, both_biases

# Names until Triton 3.6, and since.
start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
wait_copies = async_copy.wait_group


@constexpr_function
def _bits(*places):
    """Bases of a linear layout, one for each of (dimension, step) among three dimensions."""
    return [[step if axis == dimension else 0 for axis in range(3)] for dimension, step in places]


@constexpr_function
def _powers(dimension, first, end):
    found = []
    while first < end:
        found.append((dimension, first))
        first *= 2
    return found


@constexpr_function
def _layout(registers, lanes, warps, shape):
    return gl.DistributedLinearLayout(_bits(*registers), _bits(*lanes), _bits(*_powers(0, 1, warps)), [], shape)


@constexpr_function
def words_layout(warps, rows, words):
    """(warps, rows, 4 words): a thread's are neighbours; lanes 0-3 read up to 64 bytes of a row, all of them 8 rows."""
    registers = [*_powers(2, 1, words), *_powers(1, 8, rows)]
    lanes = [(2, words), (2, 2 * words), (1, 1), (1, 2), (1, 4)]
    return _layout(registers, lanes, warps, [warps, rows, 4 * words])


@constexpr_function
def scales_layout(warps, rows):
    """(warps, rows, 4): those of a thread's words."""
    return _layout(_powers(1, 8, rows), [(2, 1), (2, 2), (1, 1), (1, 2), (1, 4)], warps, [warps, rows, 4])


@constexpr_function
def x_layout(warps, rows, columns):
    """(warps, rows of x, columns): as many columns in a row as the thread has of the weight."""
    own = columns // 4
    registers = [*_powers(2, 1, own), *_powers(1, 8, rows)]
    return _layout(
        registers, [(2, own), (2, 2 * own), (1, 1), (1, 2), (1, 4)], warps, [warps, rows, columns]
    )  # fmt: skip


@gluon.jit
def _weight_factor(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr,
                   ZEROS: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """(S, N, 4 J) words as the left factor, (S, N, columns). scales, zeros: (S, N, 4), of each thread's words."""
    S: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    J: gl.constexpr = words.shape[2] // 4
    f = pairs(words, _spread(scales, J, SCALED), _spread(zeros, J, ZEROS), FORMAT, DTYPE, SCALED, ZEROS)
    if FORMAT == "int4":
        low = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        high = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(low, high).reshape([S, N, 4, J, 2, 2, 2])
        w = w.permute((0, 1, 3, 6, 5, 2, 4)).reshape([S, N, 32 * J])
    else:
        w = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3])).reshape([S, N, 4, J, 2, 2])
        w = w.permute((0, 1, 3, 5, 2, 4)).reshape([S, N, 16 * J])
    return gl.convert_layout(w.to(DTYPE, bitcast=True), layout)


@gluon.jit
def _spread(values, J: gl.constexpr, GIVEN: gl.constexpr):
    """(S, N, 4) as (S, N, 4 J), the bits of each twice in 32."""
    if GIVEN:
        twice = (values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
        S: gl.constexpr = values.shape[0]
        N: gl.constexpr = values.shape[1]
        if J >= 2:
            twice = gl.join(twice, twice)
        if J == 4:
            twice = gl.join(twice, twice)
        return twice.reshape([S, N, 4 * J])
    else:
        return values


@gluon.jit
def _x_factor(x, J: gl.constexpr, FORMAT: gl.constexpr, NEIGHBOURS: gl.constexpr, layout: gl.constexpr):
    """(S, M, columns) of x as the right factor (S, columns, M), in the order of `_weight_factor`."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    if FORMAT == "int4":
        x = x.reshape([S, M, 4, J, 2, 2, 2]).permute((0, 3, 5, 6, 2, 4, 1)).reshape([S, 32 * J, M])
    elif NEIGHBOURS:
        x = x.reshape([S, M, 4, J, 2, 2]).permute((0, 3, 4, 2, 5, 1)).reshape([S, 16 * J, M])
    else:
        x = x.reshape([S, M, 4, J, 2, 2]).permute((0, 3, 5, 2, 4, 1)).reshape([S, 16 * J, M])
    return gl.convert_layout(x, layout)


@gluon.jit
def _numbers(s_ptr, z_ptr, us_ptr, uz_ptr, row, column, block, COLUMNS: gl.constexpr, K: gl.constexpr,
             GROUPS: gl.constexpr, MIDDLE: gl.constexpr, UNROLL: gl.constexpr, GATE: gl.constexpr,
             SCALED: gl.constexpr, ZEROS: gl.constexpr):  # fmt: skip
    """Of UNROLL blocks of columns (scales, zeros, the other weight's, its), see `_some`; 0 where there are none."""
    found = ()
    for part in gl.static_range(UNROLL):
        place, inside = row + (column + (block + part) * COLUMNS) // (K // GROUPS), (block + part) * COLUMNS < K
        s, z = _some(s_ptr, z_ptr, place, inside, MIDDLE, SCALED, ZEROS)
        t, v = s, z
        if GATE:
            t, v = _some(us_ptr, uz_ptr, place, inside, MIDDLE, SCALED, ZEROS)
        found = found + ((s, z, t, v),)
    return found


@gluon.jit
def _some(s_ptr, z_ptr, place, inside, MIDDLE: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr):
    """Scales, and what is to be added to numbers, both in the dtype of the scales."""
    scales, zeros = 0, 0
    if SCALED:
        scales = gl.load(s_ptr + place, mask=inside, other=0.0)
    if ZEROS:
        zeros = (-MIDDLE - gl.load(z_ptr + place, mask=inside, other=0).to(gl.float32)).to(s_ptr.dtype.element_ty)
    return scales, zeros


@gluon.jit
def _copy(w_ptr, u_ptr, ws, us, slot, row, block, BLOCKS: gl.constexpr, J: gl.constexpr, UNROLL: gl.constexpr,
          GATE: gl.constexpr):  # fmt: skip
    """Starts to copy a step's words into slots from this one on; zeros beyond the last block."""
    for part in gl.static_range(UNROLL):
        at, inside = row + (block + part) * 4 * J, block + part < BLOCKS
        start_copy(ws.index(slot + part), w_ptr + at, mask=inside)
        if GATE:
            start_copy(us.index(slot + part), u_ptr + at, mask=inside)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=("m",))
def quantised_mma_kernel(
    x_ptr, w_ptr, s_ptr, z_ptr, u_ptr, us_ptr, uz_ptr, b_ptr, c_ptr, nw_ptr, r_ptr, y_ptr, m, n, eps, offset, scale,
    K: gl.constexpr, GROUPS: gl.constexpr, FORMAT: gl.constexpr, ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr, NORM: gl.constexpr, HAS_NW: gl.constexpr, RESIDUAL: gl.constexpr, KIND: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, J: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr, SOON: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """NORM: by the root mean square of x, which divides the sums: it is known when they are. J: words of a thread."""
    OWN: gl.constexpr = J * (8 if FORMAT == "int4" else 4)  # columns of a thread
    COLUMNS: gl.constexpr = 4 * OWN
    EARLY: gl.constexpr = BLOCK_M <= 16  # x a step before it is used: as long as registers hold it twice
    BLOCKS: gl.constexpr = K // COLUMNS
    STEPS: gl.constexpr = (BLOCKS + num_warps * UNROLL - 1) // (num_warps * UNROLL)
    SCALED: gl.constexpr = GROUPS > 1 or FORMAT == "int4"
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    NEIGHBOURS: gl.constexpr = FORMAT == "fp8" or DTYPE == gl.float16
    MIDDLE: gl.constexpr = 0 if FORMAT == "int8" else 136 if DTYPE == gl.bfloat16 else 1032
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    W: gl.constexpr = words_layout(num_warps, BLOCK_N, J)
    G: gl.constexpr = scales_layout(num_warps, BLOCK_N)
    X: gl.constexpr = x_layout(num_warps, BLOCK_M, COLUMNS)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    first = gl.program_id(0) * BLOCK_N
    w_share, w_row, word = _places(num_warps, BLOCK_N, 4 * J, W)
    g_share, g_row, thread = _places(num_warps, BLOCK_N, 4, G)
    x_share, x_row, column = _places(num_warps, BLOCK_M, COLUMNS, X)
    w_row = gl.minimum(first + w_row, n - 1).to(gl.int64) * (BLOCKS * 4 * J) + word
    g_row = gl.minimum(first + g_row, n - 1) * GROUPS
    x_at, x_mask = x_ptr + x_row * K + column, x_row < m
    # A warp's share of a step is UNROLL blocks of columns, side by side: memory likes long runs of a row.
    RUN: gl.constexpr = num_warps * UNROLL

    ws = gl.allocate_shared_memory(gl.int32, [STAGES * UNROLL, num_warps, BLOCK_N, 4 * J], SHARED)
    us = ws
    if GATE:
        us = gl.allocate_shared_memory(gl.int32, [STAGES * UNROLL, num_warps, BLOCK_N, 4 * J], SHARED)
    for early in gl.static_range(STAGES - 1):
        _copy(w_ptr, u_ptr, ws, us, early * UNROLL, w_row, w_share * UNROLL + early * RUN, BLOCKS, J, UNROLL, GATE)
    if PDL and SOON:
        tl.extra.cuda.gdc_launch_dependents()
    numbers = _numbers(s_ptr, z_ptr, us_ptr, uz_ptr, g_row, thread * OWN, g_share * UNROLL, COLUMNS, K, GROUPS, MIDDLE,
                       UNROLL, GATE, SCALED, ZEROS)  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = x_share * UNROLL
    x = gl.load(x_at + block * COLUMNS, mask=x_mask & (block < BLOCKS), other=0.0)
    acc = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, MMA)
    acc_u = acc
    squares = gl.sum(x.to(gl.float32).reshape([num_warps, BLOCK_M, 4, OWN]), axis=3) * 0.0
    for step in range(STEPS):
        wait_copies(STAGES - 2)
        far = step + STAGES - 1
        _copy(w_ptr, u_ptr, ws, us, far % STAGES * UNROLL, w_row, w_share * UNROLL + far * RUN, BLOCKS, J, UNROLL, GATE)
        following = _numbers(s_ptr, z_ptr, us_ptr, uz_ptr, g_row, thread * OWN, g_share * UNROLL + (step + 1) * RUN,
                             COLUMNS, K, GROUPS, MIDDLE, UNROLL, GATE, SCALED, ZEROS)  # fmt: skip
        for part in gl.static_range(UNROLL):
            block = x_share * UNROLL + step * RUN + part
            after = block + (1 if part + 1 < UNROLL else RUN - UNROLL + 1)
            x_next = x
            if EARLY:
                x_next = gl.load(x_at + after * COLUMNS, mask=x_mask & (after < BLOCKS), other=0.0)
            if NORM:
                wide = x.to(gl.float32)
                squares += gl.sum((wide * wide).reshape([num_warps, BLOCK_M, 4, OWN]), axis=3)
                if HAS_NW:
                    nw = gl.load(nw_ptr + column + block * COLUMNS, mask=block < BLOCKS, other=0.0)
                    x = (wide * (nw.to(gl.float32) + offset)).to(DTYPE)
            right = _x_factor(x, J, FORMAT, NEIGHBOURS, RIGHT)
            s, z, t, v = numbers[part]
            w = ws.index(step % STAGES * UNROLL + part).load(W)
            acc = mma_v2(_weight_factor(w, s, z, FORMAT, DTYPE, SCALED, ZEROS, LEFT), right, acc)
            if GATE:
                u = us.index(step % STAGES * UNROLL + part).load(W)
                acc_u = mma_v2(_weight_factor(u, t, v, FORMAT, DTYPE, SCALED, ZEROS, LEFT), right, acc_u)
            if not EARLY:
                x_next = gl.load(x_at + after * COLUMNS, mask=x_mask & (after < BLOCKS), other=0.0)
            x = x_next
        numbers = following
    if PDL and not SOON:
        tl.extra.cuda.gdc_launch_dependents()

    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    y = gl.convert_layout(gl.sum(acc, axis=0), OUT)
    other = y
    if GATE:
        other = gl.convert_layout(gl.sum(acc_u, axis=0), OUT)
    if NORM:
        mean = gl.convert_layout(gl.sum(gl.sum(squares, axis=2), axis=0), gl.SliceLayout(0, OUT)) / K
        rate = gl.expand_dims(gl.rsqrt(mean + eps), 0)
        y, other = y * rate, other * rate
    row = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT)), 1)
    out = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT)), 0)
    if not SCALED:
        y *= gl.load(s_ptr + row, mask=row < n, other=0.0).to(gl.float32)
        if GATE:
            other *= gl.load(us_ptr + row, mask=row < n, other=0.0).to(gl.float32)
    if HAS_BIAS:
        y += gl.load(b_ptr + row, mask=row < n, other=0.0).to(gl.float32)
    y = activate(y, KIND)
    if GATE:
        if HAS_BIAS:
            other += gl.load(c_ptr + row, mask=row < n, other=0.0).to(gl.float32)
        y *= other
    y *= scale
    place, mask = out.to(gl.int64) * n + row, (out < m) & (row < n)
    if RESIDUAL:
        y += gl.load(r_ptr + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _places(SHARES: gl.constexpr, ROWS: gl.constexpr, LAST: gl.constexpr, layout: gl.constexpr):
    """Indices of the three dimensions, each (.., 1, ..)."""
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    last = gl.arange(0, LAST, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    return (
        gl.expand_dims(gl.expand_dims(share, 1), 2),
        gl.expand_dims(gl.expand_dims(row, 0), 2),
        gl.expand_dims(gl.expand_dims(last, 0), 0),
    )


class Tile(NamedTuple):
    """Rows of the weight to a program, and its warps, each of which takes a share of the columns."""

    rows: int
    warps: int
    unroll: int = 4
    stages: int = 3
    soon: bool = True  # whether the next kernel may start at once


def words(format: str, rows: int) -> int:
    """Of a thread: 16 bytes, 8 where x takes the registers."""
    return 2 if format == "int4" and rows > 32 else 4


def columns(format: str, rows: int) -> int:
    """What K must be a multiple of."""
    return 4 * words(format, rows) * (8 if format == "int4" else 4)


def quantised_mma(x, weight, bias, norm, up, up_bias, activation, residual, scale, format, tile, y):
    """Writes what `quantised_projection` returns into y. format: "int8", "int4" or "fp8"."""
    n, k = weight.shape
    rows = x.numel() // k
    gate, pdl = up is not None, programmatic(x.device)
    up_bias = both_biases(bias, up_bias, gate)
    if gate and bias is None and up_bias is not None:
        bias = torch.zeros_like(up_bias)
    inside = norm is not None and not norm.centred and norm.bias is None and x.dtype == torch.bfloat16 and rows <= 8
    if norm is not None and not inside:
        x = apply_norm(x, norm)
    launch(
        quantised_mma_kernel, (triton.cdiv(n, tile.rows),),
        x, weight.data.view(torch.int32), weight.scales, weight.zeros,
        *((up.data.view(torch.int32), up.scales, up.zeros) if gate else (None, None, None)), bias, up_bias,
        norm.weight if inside else None, residual, y, rows, n, float(norm.eps if inside else 0.0),
        float(norm.offset if inside else 0.0), float(scale),
        K=k, GROUPS=weight.scales.shape[1], FORMAT=format, ZEROS=weight.zeros is not None, HAS_BIAS=bias is not None,
        GATE=gate, NORM=inside, HAS_NW=inside and norm.weight is not None, RESIDUAL=residual is not None,
        KIND=activation, BLOCK_M=max(8, power_of_two(rows)), BLOCK_N=tile.rows, STAGES=tile.stages, UNROLL=tile.unroll, SOON=tile.soon, J=words(format, rows), PDL=bool(pdl), num_warps=tile.warps,
        **pdl,
    )  # fmt: skip
