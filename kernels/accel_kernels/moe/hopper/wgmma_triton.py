"""Grouped experts in 4 bits, for Hopper: numbers unpacked straight into the left factor of a warpgroup's products.

What `grouped_triton.py` says of tiles and of the order of kernels holds here. Words of the weight come through a ring
of boxes of 256 inputs. Rows of x come through one of pieces of 128; they are sorted by expert, their columns as
`column_of` has them. While some inputs are multiplied, the next are unpacked. A program has BLOCK_N rows of the weight:
gates and as many ups, or two blocks of rows. Inner channels are stored as the second product reads them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from accel_kernels.device import Feature, has
from accel_kernels.gemm.gluon_triton import all_threads, start_load, tensor_map
from accel_kernels.gemm.quantized.operands.permuted_activations_triton import column_of
from accel_kernels.gemm.quantized.operands.wgmma_operands_triton import half_layout
from accel_kernels.gemm.quantized.operands.wgmma_units_triton import box_scales, pieces_of, scale_pairs, unit, units_of
from accel_kernels.gemm.quantized_weight import INT4, MX_GROUP, MXFP4, PackedWeight, Quantized
from accel_kernels.moe.grouped_triton import places_of_tile
from accel_kernels.moe.hopper.wgmma_stores_triton import store_inner, store_pairs
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

PIECE = tl.constexpr(128)  # inputs
BLOCK = 1024  # columns of a program that sorts x


class RowsTile(NamedTuple):
    """Rows of the weight and warps of a program; pairs of a product, and of one beside it where there are more; its
    inputs; stages of the rings.
    """

    weight_rows: int
    warps: int
    least: int
    beside: int
    inputs: int
    stages: int
    x_stages: int

    @property
    def rows(self) -> int:
        return self.least + self.beside


# Two programs to a multiprocessor, of which one unpacks while the other multiplies; and one that reads less of x again.
FEW, MANY = RowsTile(128, 4, 64, 32, 64, 2, 3), RowsTile(256, 8, 64, 64, 32, 3, 3)


@gluon.jit
def expert_products(
    descs, weight, rings, rows_at, first, M: gl.constexpr, T: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr,
    FORMAT: gl.constexpr, BLOCK_N: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Sums of BLOCK_N rows of the weight with the M rows of x from `first` on, and with T more behind them."""
    x_desc, t_desc, w_desc, u_desc = descs
    ws, us, xs, ts, w_ready, x_ready = rings
    w_row, u_row, low, high = rows_at
    DTYPE: gl.constexpr = x_desc.dtype
    ZEROS: gl.constexpr = weight.zeros is not None
    WORDS: gl.constexpr = INPUTS // 32
    BOXES: gl.constexpr = (K + 2 * PIECE - 1) // (2 * PIECE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, M, 16])
    TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, max(T, 8), 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    READ: gl.constexpr = half_layout(num_warps, BLOCK_N // 2, 8)
    L: gl.constexpr = half_layout(num_warps, BLOCK_N // 2, 1)
    BYTES: gl.constexpr = 2 * w_desc.block_type.nbytes
    X_BYTES: gl.constexpr = x_desc.block_type.nbytes + (t_desc.block_type.nbytes if T > 0 else 0)
    for early in gl.static_range(STAGES):
        mbarrier.expect(w_ready.index(early), BYTES, pred=early < BOXES)
        start_load(w_desc, [w_row, early * 32], w_ready.index(early), ws.index(early), pred=early < BOXES)
        start_load(u_desc, [u_row, early * 32], w_ready.index(early), us.index(early), pred=early < BOXES)
    column = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0) * (PIECE // 4)
    ahead = box_scales(weight, low, high, column, K, GROUPS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for early in gl.static_range(X_STAGES - 1):
        ready, inside = x_ready.index(early), early < 2 * BOXES
        mbarrier.expect(ready, X_BYTES, pred=inside)
        start_load(x_desc, [first, early * PIECE], ready, xs.index(early), pred=inside)
        if T > 0:
            start_load(t_desc, [first + M, early * PIECE], ready, ts.index(early), pred=inside)
    acc = gl.zeros([BLOCK_N, M], gl.float32, MMA)
    tail = gl.zeros([BLOCK_N, max(T, 8)], gl.float32, TAIL)
    for box in range(BOXES):
        slot = box % STAGES
        mbarrier.wait(w_ready.index(slot), box // STAGES & 1)
        words = pieces_of(ws.index(slot).load(READ), us.index(slot).load(READ))
        now = ahead
        for part in gl.static_range(2):
            piece = 2 * box + part
            x_slot, more = piece % X_STAGES, piece + X_STAGES - 1
            scales, zeros = scale_pairs(now[part], WORDS, FORMAT, DTYPE, ZEROS)
            units = units_of(words[part], WORDS)
            for turn in gl.static_range(PIECE // INPUTS):
                left = unit(units[turn], scales, zeros, FORMAT, DTYPE, ZEROS, LEFT, num_warps)
                if turn == 0:
                    mbarrier.wait(x_ready.index(x_slot), piece // X_STAGES & 1)
                right = xs.index(x_slot).slice(turn * INPUTS, INPUTS, 1).permute((1, 0))
                acc = warpgroup_mma(left, right, acc, is_async=True)
                if T > 0:
                    left = gl.convert_layout(left, gl.DotOperandLayout(0, TAIL, 2))
                    right = ts.index(x_slot).slice(0, T, 0).slice(turn * INPUTS, INPUTS, 1).permute((1, 0))
                    tail = warpgroup_mma(left, right, tail, is_async=True)
                    acc, tail = warpgroup_mma_wait(2, deps=(acc, tail))
                else:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                if turn == 0:
                    all_threads()  # all warps are done with the piece before this one, and have read the box's words
                    ready, to, inside = x_ready.index(more % X_STAGES), more % X_STAGES, more < 2 * BOXES
                    mbarrier.expect(ready, X_BYTES, pred=inside)
                    start_load(x_desc, [first, more * PIECE], ready, xs.index(to), pred=inside)
                    if T > 0:
                        start_load(t_desc, [first + M, more * PIECE], ready, ts.index(to), pred=inside)
                    if part == 0:
                        next, ready = box + STAGES, w_ready.index(slot)
                        mbarrier.expect(ready, BYTES, pred=next < BOXES)
                        start_load(w_desc, [w_row, next * 32], ready, ws.index(slot), pred=next < BOXES)
                        start_load(u_desc, [u_row, next * 32], ready, us.index(slot), pred=next < BOXES)
                        ahead = box_scales(weight, low, high, column + (box + 1) * (2 * PIECE), K, GROUPS)
    if T > 0:
        acc, tail = warpgroup_mma_wait(0, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, tail


@gluon.jit
def product_of(
    descs, weight, rings, rows_at, to, place, M: gl.constexpr, T: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr,
    FORMAT: gl.constexpr, UP: gl.constexpr, GATING: gl.constexpr, INTERLEAVED: gl.constexpr, BLOCK_N: gl.constexpr,
    INPUTS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`expert_products` of a tile of up to M + T pairs, and where they go."""
    bias_ptr, order_ptr, y_ptr, wide, padded = to
    expert, n, first, end = place
    acc, tail = expert_products(
        descs, weight, rings, rows_at, first, M, T, K, GROUPS, FORMAT, BLOCK_N, INPUTS, STAGES, X_STAGES, PDL, num_warps
    )
    if UP:
        store_inner(acc, bias_ptr, y_ptr, expert, n, first, end, wide, padded, GATING, INTERLEAVED, num_warps)
        if T > 0:
            store_inner(tail, bias_ptr, y_ptr, expert, n, first + M, end, wide, padded, GATING, INTERLEAVED, num_warps)
    else:
        store_pairs(acc, bias_ptr, order_ptr, y_ptr, expert, n, first, end, wide, num_warps)
        if T > 0:
            store_pairs(tail, bias_ptr, order_ptr, y_ptr, expert, n, first + M, end, wide, num_warps)


@gluon.jit
def expert_rows_kernel(
    x_desc, t_desc, w_desc, u_desc, weight, bias_ptr, order_ptr, starts_ptr, tiles_ptr, y_ptr, wide, padded,
    K: gl.constexpr, GROUPS: gl.constexpr, FORMAT: gl.constexpr, UP: gl.constexpr, GATING: gl.constexpr,
    INTERLEAVED: gl.constexpr, BLOCK_N: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A tile of pairs times rows of its expert: gates and ups where UP. x_desc, t_desc: boxes of rows of the
    products and of those beside them. wide: outputs of an expert, inner channels where UP; padded: columns of these as
    stored.
    """
    H: gl.constexpr = BLOCK_N // 2
    M: gl.constexpr = x_desc.block_type.shape[0]
    T: gl.constexpr = t_desc.block_type.shape[0]
    tile = gl.program_id(0)
    expert = gl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    first, end = places_of_tile(tile, expert, starts_ptr, M + T)
    end, expert = gl.minimum(end, first + M + T), expert.to(gl.int64)
    # A ring to each operand: of two loads into one the compiler makes the second wait for all warps.
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, H, 32], w_desc.layout)
    us = gl.allocate_shared_memory(gl.int32, [STAGES, H, 32], u_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, M, PIECE], x_desc.layout)
    ts = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, T, PIECE], x_desc.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(w_ready.index(early), count=1)
    for early in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(early), count=1)
    fence_async_shared()
    all_threads()
    n = gl.program_id(1) * (H if UP else BLOCK_N)
    row = gl.arange(0, H, layout=gl.SliceLayout(1, half_layout(num_warps, H, 1)))
    row = gl.expand_dims(gl.minimum(n + row, wide - 1), 1)
    rows = expert * wide
    w_row, u_row, low, high = rows + n, rows + n + H, rows + row, rows + gl.minimum(row + H, wide - 1)
    if UP:
        if INTERLEAVED:  # each described by itself
            u_row, low = w_row, 2 * (rows + row)
            high = low + 1
        else:
            w_row, u_row, low = 2 * rows + n, 2 * rows + wide + n, 2 * rows + row
            high = low + wide
    rows_at = (w_row.to(gl.int32), u_row.to(gl.int32), low * GROUPS, high * GROUPS)
    to, place = (bias_ptr, order_ptr, y_ptr, wide, padded), (expert, n, first, end)
    if end - first <= T:
        product_of(
            (t_desc, t_desc, w_desc, u_desc), weight, (ws, us, ts, ts, w_ready, x_ready), rows_at, to, place, T, 0, K,
            GROUPS, FORMAT, UP, GATING, INTERLEAVED, BLOCK_N, INPUTS, STAGES, X_STAGES, PDL, num_warps,
        )  # fmt: skip
    elif end - first <= M:
        product_of(
            (x_desc, t_desc, w_desc, u_desc), weight, (ws, us, xs, ts, w_ready, x_ready), rows_at, to, place, M, 0, K,
            GROUPS, FORMAT, UP, GATING, INTERLEAVED, BLOCK_N, INPUTS, STAGES, X_STAGES, PDL, num_warps,
        )  # fmt: skip
    else:
        product_of(
            (x_desc, t_desc, w_desc, u_desc), weight, (ws, us, xs, ts, w_ready, x_ready), rows_at, to, place, M, T, K,
            GROUPS, FORMAT, UP, GATING, INTERLEAVED, BLOCK_N, INPUTS, STAGES, X_STAGES, PDL, num_warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=("chosen", "experts"))
def sorted_rows_kernel(
    x_ptr, order_ptr, starts_ptr, y_ptr, chosen, experts, columns, padded, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Rows of x by the order of their pairs, columns by `column_of`; zeros behind them."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = column_of(place, True, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if row < tl.load(starts_ptr + experts):
        token = tl.load(order_ptr + row) // chosen
        x = tl.load(x_ptr + token * columns + column, mask=column < columns, other=0.0)
        tl.store(y_ptr + row * padded + place, x, mask=place < padded)


def tile_for(x, weights, rows: int) -> RowsTile | None:
    """For pairs that other kernels take by so many rows; None for experts that these do not multiply, or not faster."""
    stacks = weights[:2]
    taken = (
        rows >= FEW.least
        and weights.places is None
        and has(x.device, Feature.WARPGROUPS)
        and x.dtype == torch.bfloat16
        and weights.gating.gated
        and all(isinstance(one, Quantized) and one.format in (INT4, MXFP4) for one in stacks)
        and all(one.scales.shape[1] > 1 and one.shape[1] % MX_GROUP == 0 for one in stacks)
        and all(one.float_scales is None or one.scales.dtype == x.dtype for one in stacks)
        and all(one.data.data_ptr() % 16 == 0 for one in stacks)
    )
    return (FEW if rows == FEW.least else MANY) if taken else None


def grouped(x, groups, weights, given, chosen, tile, pdl):
    """What experts make of their pairs, into `given` (pairs, H). groups: of `group_kernel`, of as many rows."""
    order, starts, tiles = groups
    placed, h = (
        torch.empty((len(given), cdiv(inputs, PIECE.value) * PIECE.value), device=x.device, dtype=x.dtype)
        for inputs in (weights.hidden, weights.inner)
    )
    launch(
        sorted_rows_kernel, (len(given), cdiv(placed.shape[1], BLOCK)), x, order, starts, placed, chosen,
        weights.experts, weights.hidden, placed.shape[1], BLOCK=BLOCK, num_warps=4, **pdl,
    )  # fmt: skip
    half = tile.weight_rows // 2
    for up, source, to in ((True, placed, h), (False, h, given)):
        stack, bias = (weights.gate_up, weights.gate_up_bias) if up else (weights.down, weights.down_bias)
        words, wide = stack.data.view(torch.int32), weights.inner if up else weights.hidden
        blocks = (words[::2], words[1::2]) if up and weights.interleaved else (words, words)
        launch(
            expert_rows_kernel, (len(tiles), cdiv(h.shape[1], half) if up else cdiv(wide, tile.weight_rows)),
            *(tensor_map(source, rows, PIECE.value) for rows in (tile.least, tile.beside)),
            *(tensor_map(one, half, 32) for one in blocks),
            PackedWeight.of(stack)._replace(words=None), bias, order, starts, tiles, to, wide, h.shape[1],
            K=stack.shape[1], GROUPS=stack.scales.shape[1], FORMAT=stack.format.name, UP=up, GATING=weights.gating,
            INTERLEAVED=weights.interleaved, BLOCK_N=tile.weight_rows, INPUTS=tile.inputs, STAGES=tile.stages,
            X_STAGES=tile.x_stages, num_warps=tile.warps, **pdl,
        )  # fmt: skip
