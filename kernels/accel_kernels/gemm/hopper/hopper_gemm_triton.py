"""A persistent product of 16-bit or 8-bit operands by specialized warps, for Hopper (compute capability 9.0).

A program is a warp that loads and two warpgroups that multiply. The warp brings steps of K through the tensor memory
accelerator into a ring, tile after tile. The warpgroups take tiles in turn: while one writes, the other has the tensor
cores.

A tile is written in pieces of 64 columns, through shared memory. With a gate a tile holds the same rows of both weights
side by side, so that one instruction multiplies both, and a thread holds both sums of an output.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from accel_kernels.device import multiprocessors
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.epilogue_triton import tile_place
from accel_kernels.gemm.gluon_triton import RENAMED, all_threads, column_blocks, start_store, tensor_map
from accel_kernels.gemm.hopper.finish_triton import finish_arguments, finished, placed
from accel_kernels.gemm.hopper.load_triton import GROUP, load
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

HEIGHT, COLUMNS = 128, 128  # of a tile; with a gate half of the columns are the other weight's
STEP = 128  # bytes of a row in a step of K: a tensor map's widest swizzle
STAGES = {False: 5, True: 4}  # steps of K in the ring, as many as fit into 227 KiB of shared memory; with adapters
WIDTH = gl.constexpr(64)  # columns of a piece
WIDER = 32  # columns that a tile may have beyond, where rounds of the GPU's multiprocessors are fuller then
FUSED = (16, 32)  # ranks with which x A^T is computed beside the product: more would take longer than a pass of its own
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
# Registers of a thread that multiplies and of one that loads: of two warpgroups and of a third, in steps of 8, at most
# 65536. WORKERS: warps, and registers, of all partitions but the first.
MULTIPLY, LOAD = 232, 40
WORKER_WARPS, WORKER_REGISTERS = gl.constexpr([4, 1]), gl.constexpr([MULTIPLY, LOAD])


@gluon.jit
def _whole(ring, STAGES: gl.constexpr):
    """A ring of weights, with a gate's rows in the same buffer."""
    BLOCK_N: gl.constexpr = ring.shape[0] * ring.shape[1] // STAGES
    if ring.shape[1] == BLOCK_N:
        return ring
    elif RENAMED:
        return ring.reinterpret(ring.dtype, [STAGES, BLOCK_N, ring.shape[2]], ring.layout)
    else:
        return ring._reinterpret(ring.dtype, [STAGES, BLOCK_N, ring.shape[2]], ring.layout)


@gluon.jit
def _step(x, weights, sums, slot, EXTRA: gl.constexpr, TOGETHER: gl.constexpr):
    """Starts a step's products with the weight, its columns beyond and A. Returns the sums, those of before done."""
    acc, beyond, inner = sums
    acc = warpgroup_mma(x, weights[0].index(slot).permute((1, 0)), acc, is_async=True)
    if EXTRA > 0:
        beyond = warpgroup_mma(x, weights[1].index(slot).permute((1, 0)), beyond, is_async=True)
    if TOGETHER:
        inner = warpgroup_mma(x, weights[2].index(slot).permute((1, 0)), inner, is_async=True)
    return _done((acc, beyond, inner), 1, EXTRA, TOGETHER)


@gluon.jit
def _done(sums, STEPS: gl.constexpr, EXTRA: gl.constexpr, TOGETHER: gl.constexpr):
    """The sums, once products of at most so many steps are under way."""
    acc, beyond, inner = sums
    if EXTRA > 0 and TOGETHER:
        acc, beyond, inner = warpgroup_mma_wait(3 * STEPS, deps=(acc, beyond, inner))
    elif EXTRA > 0:
        acc, beyond = warpgroup_mma_wait(2 * STEPS, deps=(acc, beyond))
    elif TOGETHER:
        acc, inner = warpgroup_mma_wait(2 * STEPS, deps=(acc, inner))
    else:
        acc = warpgroup_mma_wait(STEPS, deps=(acc,))
    return acc, beyond, inner


@gluon.jit
def _times_up(sums, ups, mine, DTYPE: gl.constexpr, EXTRA: gl.constexpr):
    """The sums with those of adapters: x A^T, rounded, times B."""
    acc, beyond, inner = sums
    MMA: gl.constexpr = acc.type.layout
    rounded = inner.to(DTYPE)
    left = gl.convert_layout(rounded, gl.DotOperandLayout(0, MMA, 2))
    acc = warpgroup_mma(left, ups[0].index(mine).permute((1, 0)), acc, is_async=True)
    if EXTRA > 0:
        BEYOND: gl.constexpr = beyond.type.layout
        left = gl.convert_layout(rounded, gl.DotOperandLayout(0, BEYOND, 2))
        beyond = warpgroup_mma(left, ups[1].index(mine).permute((1, 0)), beyond, is_async=True)
    return acc, beyond, inner


@gluon.jit
def _multiply(y_descs, rings, ready, free, out, after, sizes, places, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
              ROUNDED: gl.constexpr, RANK: gl.constexpr, EXTRA: gl.constexpr, TOGETHER: gl.constexpr,
              MINE: gl.constexpr):  # fmt: skip
    """A warpgroup, of every other tile of this program. MINE: 0, the one with the first tile, or 1.

    out: each warpgroup's buffers of pieces, and both's of the columns beyond.
    """
    xs = rings[0]
    STAGES: gl.constexpr = xs.shape[0]
    ws = _whole(rings[1], STAGES)
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    BLOCK_N: gl.constexpr = ws.shape[1]
    BUFFERS: gl.constexpr = out[0].shape[0]
    SUM: gl.constexpr = gl.int32 if xs.dtype == gl.int8 else gl.float32
    DEPTH: gl.constexpr = 256 // xs.dtype.primitive_bitwidth
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    PIECES: gl.constexpr = BLOCK_N // WIDTH
    WRITTEN: gl.constexpr = PIECES // 2 if GATE else PIECES
    PENDING: gl.constexpr = BUFFERS - 1 if WRITTEN % BUFFERS == 0 and EXTRA == 0 else 0
    tiles_m, tiles_n, depth = sizes
    programs, steps = gl.num_programs(0), gl.cdiv(depth, BLOCK_K) + (0 if TOGETHER else gl.cdiv(RANK, BLOCK_K))
    at, turn = steps * MINE, gl.to_tensor(0)  # steps of the ring before this tile, and the phase of the next turn
    held = gl.to_tensor(0)  # the phase of the next B
    for tile in range(gl.program_id(0) + MINE * programs, tiles_m * tiles_n, 2 * programs):
        if tile >= programs:  # the other warpgroup's comes before, or phases of `ready` could be taken for earlier ones
            mbarrier.wait(free[1].index(MINE), turn)
            turn = 1 - turn
        slot, phase, last = at % STAGES, at // STAGES & 1, at % STAGES
        at += 2 * steps
        acc = gl.zeros([BLOCK_M, BLOCK_N], SUM, MMA)
        beyond, inner = acc, acc
        if EXTRA > 0:
            beyond = gl.zeros([BLOCK_M, EXTRA], SUM, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA, DEPTH]))
        if TOGETHER:
            inner = gl.zeros([BLOCK_M, RANK], SUM, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RANK, DEPTH]))
        for step in range(0, steps):
            mbarrier.wait(ready[0].index(slot), phase)
            sums = _step(xs.index(slot), (ws, rings[2], rings[3]), (acc, beyond, inner), slot, EXTRA, TOGETHER)
            acc = sums[0]
            if EXTRA > 0:
                beyond = sums[1]
            if TOGETHER:
                inner = sums[2]
            mbarrier.arrive(free[0].index(last), pred=step > 0)
            last = slot
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = 1 - phase
        mbarrier.arrive(free[1].index(1 - MINE))
        acc, beyond, inner = _done((acc, beyond, inner), 0, EXTRA, TOGETHER)
        mbarrier.arrive(free[0].index(last))
        if TOGETHER:
            mbarrier.wait(ready[1].index(MINE), held)
            held = 1 - held
            acc, beyond, inner = _times_up((acc, beyond, inner), (_whole(rings[4], 2), rings[5]), MINE, xs.dtype, EXTRA)
            acc, beyond, inner = _done((acc, beyond, inner), 0, EXTRA, False)
            mbarrier.arrive(free[2].index(MINE))
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        pieces = column_blocks(acc, PIECES)
        for piece in gl.static_range(WRITTEN):
            buffer, column = out[MINE].index(piece % BUFFERS), n * (WRITTEN * WIDTH + EXTRA) + piece * WIDTH
            y, other = placed(pieces[piece]), placed(pieces[(piece + WRITTEN) % PIECES])
            y = finished(y, other, m * BLOCK_M, column, after, places, y_descs[0].dtype, GATE, ACTIVATION, ROUNDED)
            _write(y, y_descs[0], m * BLOCK_M, column, buffer, PENDING)
        if EXTRA > 0:
            column = n * (WRITTEN * WIDTH + EXTRA) + WRITTEN * WIDTH
            y = finished(
                beyond, beyond, m * BLOCK_M, column, after, places, y_descs[1].dtype, GATE, ACTIVATION, ROUNDED
            )
            _write(y, y_descs[1], m * BLOCK_M, column, out[2].index(MINE), PENDING)
    tma.store_wait(0)


@gluon.jit
def _write(y, desc, row, column, buffer, PENDING: gl.constexpr):
    """Stores a piece through this buffer, which earlier stores but PENDING have left."""
    tma.store_wait(PENDING)
    all_threads()
    buffer.store(y)
    fence_async_shared()
    all_threads()
    start_store(desc, [row, column], buffer)


@gluon.jit(do_not_specialize="rows eighths depth modulation_rise residual_rise share first second".split())
def hopper_gemm_kernel(
    x_desc, w_desc, u_desc, beyond_desc, down_desc, y_desc, y_beyond_desc, inner_desc, b_desc, c_desc, b_beyond_desc,
    after, rows, eighths, depth, modulation_rise, residual_rise, share, first, second, GATE: gl.constexpr,
    ACTIVATION: gl.constexpr, ROUNDED: gl.constexpr, RANK: gl.constexpr, EXTRA: gl.constexpr, TOGETHER: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Maps of x, the weight, its gate's, the weight for a tile's columns beyond, and A; of the result, and for those
    columns; of x A^T, B, its gate's, and for those columns. eighths: of the outputs. modulation_rise, residual_rise:
    eighths of the numbers from row to row. So the compiler sees how they are aligned. share: rows of x to a row of
    modulation. first, second: where parts of the outputs end. RANK: of adapters, 0 for none; TOGETHER: with x A^T.
    EXTRA: columns of a tile beyond those of its box.
    """
    descs, y_descs = (x_desc, w_desc, u_desc, beyond_desc, down_desc), (y_desc, y_beyond_desc)
    b_descs = inner_desc, b_desc, c_desc, b_beyond_desc
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = 2 * BOX if GATE else BOX
    BUFFERS: gl.constexpr = 1 if EXTRA > 0 else 2  # pieces of a warpgroup in shared memory
    DTYPE: gl.constexpr = x_desc.dtype
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(DTYPE, [STAGES * BLOCK_N // BOX, BOX, BLOCK_K], w_desc.layout)
    out_first = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BLOCK_M, WIDTH], y_desc.layout)
    out_second = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BLOCK_M, WIDTH], y_desc.layout)
    beyond, down, up, up_beyond, out_beyond = xs, xs, xs, xs, xs
    if EXTRA > 0:
        beyond = gl.allocate_shared_memory(DTYPE, [STAGES, EXTRA, BLOCK_K], descs[3].layout)
        out_beyond = gl.allocate_shared_memory(y_desc.dtype, [2, BLOCK_M, EXTRA], y_descs[1].layout)
    if TOGETHER:
        down = gl.allocate_shared_memory(DTYPE, [STAGES, RANK, BLOCK_K], descs[4].layout)
        up = gl.allocate_shared_memory(DTYPE, [2 * BLOCK_N // BOX, BOX, RANK], b_descs[1].layout)
        if EXTRA > 0:
            up_beyond = gl.allocate_shared_memory(DTYPE, [2, EXTRA, RANK], b_descs[3].layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    multiplied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    up_loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    up_multiplied = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(2):
        mbarrier.init(turns.index(warpgroup), count=1)
        mbarrier.init(up_loaded.index(warpgroup), count=1)
        mbarrier.init(up_multiplied.index(warpgroup), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(multiplied.index(slot), count=1)
    fence_async_shared()
    all_threads()
    sizes = gl.cdiv(rows, BLOCK_M), gl.cdiv(eighths * (16 if GATE else 8), BLOCK_N + EXTRA), depth
    places = rows, eighths, modulation_rise, residual_rise, share
    rings, out = (xs, ws, beyond, down, up, up_beyond), (out_first, out_second, out_beyond)
    ready, free, low = (loaded, up_loaded), (multiplied, turns, up_multiplied), (b_descs, first, second)
    # Written out: a variable would hold tensors of the constants.
    gl.warp_specialize(
        [
            (_multiply, (y_descs, rings, ready, free, out, after, sizes, places, GATE, ACTIVATION, ROUNDED, RANK, EXTRA,
                         TOGETHER, FIRST)),
            (_multiply, (y_descs, rings, ready, free, out, after, sizes, places, GATE, ACTIVATION, ROUNDED, RANK, EXTRA,
                         TOGETHER, SECOND)),
            (load, (descs, rings, ready, free, sizes, low, GATE, RANK, EXTRA, TOGETHER)),
        ],
        WORKER_WARPS, WORKER_REGISTERS,
    )  # fmt: skip


def hopper_gemm(x, weight, bias=None, *, low_rank=None, rounded=False, fast=False, out=None, extra=None, **after):
    """Same arguments and result as the reference. extra: columns of a tile beyond, else chosen by size."""
    epilogue = Epilogue(bias, **after)
    modulation, residual = epilogue.modulation, epilogue.residual
    gate, quantized = epilogue.up is not None, isinstance(x, QuantizedRows)
    numbers, *weights = (one.data if quantized else one.detach() for one in (x, *epilogue.weights(weight)))
    (n, depth), rows, step = weights[0].shape, numbers.numel() // numbers.shape[-1], STEP // numbers.element_size()
    y = torch.empty((*numbers.shape[:-1], n), device=numbers.device, dtype=x.dtype) if out is None else out
    box = COLUMNS // 2 if gate else COLUMNS
    rank = 0 if low_rank is None else low_rank.rank
    together = low_rank is not None and rank in FUSED and low_rank.rows is None
    if extra is None:
        extra = 0 if low_rank is None or gate else _wider(rows, n, low_rank.ends, rank, numbers.device)
    tiles = cdiv(rows, HEIGHT) * cdiv(n * (2 if gate else 1), COLUMNS + extra)
    x_map, w_map = tensor_map(matrix(numbers), HEIGHT, step), tensor_map(weights[0], box, step)
    descs = [x_map, w_map, w_map if not gate else tensor_map(weights[-1], box, step), w_map, w_map]
    y_map = tensor_map(matrix(y), HEIGHT, WIDTH.value)
    y_maps, b_maps = [y_map, y_map], [x_map, w_map, w_map, w_map]
    if extra:
        descs[3], y_maps[1] = tensor_map(weights[0], extra, step), tensor_map(matrix(y), HEIGHT, extra)
    if low_rank is not None:
        width, gate_up = (rank if together else step), low_rank.up if low_rank.gate_up is None else low_rank.gate_up
        maps = (low_rank.up, box), (gate_up, box), (low_rank.up, extra or box)
        b_maps[1:] = [tensor_map(one, height, width) for one, height in maps]
        if together:
            descs[4] = tensor_map(low_rank.down, rank, step)
        else:
            b_maps[0] = tensor_map(matrix(low_rank.inner(x)), HEIGHT, step)
    first, second = (0, 0) if low_rank is None else (*low_rank.ends, *(low_rank.ends[-1],) * 2)[:2]
    scales = [x.scales, *(one.scales for one in epilogue.weights(weight))] if quantized else [None]
    launch(
        hopper_gemm_kernel, (min(tiles, multiprocessors(numbers.device)),),
        *descs, *y_maps, *b_maps, finish_arguments(epilogue, scales), rows, n // 8, depth,
        1 if modulation is None else modulation.stride(0) // 8,
        1 if residual is None else matrix(residual).stride(0) // 8,
        1 if modulation is None else rows // len(modulation), first, second, **epilogue.flags, ROUNDED=rounded,
        RANK=rank, EXTRA=extra, TOGETHER=together, STAGES=STAGES[low_rank is not None], num_warps=4,
        **({"enable_fp_fusion": False} if rounded else {}),  # or modulation and residual would be rounded together
    )  # fmt: skip
    return y


def _wider(rows: int, n: int, ends: tuple[int, ...], rank: int, device: torch.device) -> int:
    """Columns of a tile beyond its box: those with which the rounds of all tiles take less time."""
    if rank == FUSED[-1] or any(end % (COLUMNS + WIDER) for end in ends[:-1]):
        return 0  # no room in shared memory, or tiles of two parts

    def columns(width: int) -> int:
        return width * cdiv(cdiv(rows, HEIGHT) * cdiv(n, width), multiprocessors(device))

    return WIDER if columns(COLUMNS + WIDER) < columns(COLUMNS) else 0


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """(..., N) of evenly spaced rows as (M, N), a view."""
    return tensor.view(-1, tensor.shape[-1])
