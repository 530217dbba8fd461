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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from accel_kernels.device import multiprocessors
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.epilogue_triton import tile_place
from accel_kernels.gemm.gluon_triton import RENAMED, all_threads, column_blocks, start_load, start_store
from accel_kernels.gemm.hopper.finish_triton import FinishArguments, finished, placed
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.warmup import launch

HEIGHT, COLUMNS = 128, 128  # of a tile; with a gate half of the columns are the other weight's
STEP = 128  # bytes of a row in a step of K: a tensor map's widest swizzle
STAGES = gl.constexpr(5)  # steps of K in the ring, as many as fit into 227 KiB of shared memory
GROUP = gl.constexpr(16)  # rows of tiles that walk along the columns together
WIDTH, BUFFERS = gl.constexpr(64), gl.constexpr(2)  # columns of a piece; pieces of a warpgroup in shared memory
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
# Registers of a thread that multiplies and of one that loads: of two warpgroups and of a third, in steps of 8, at most
# 65536. WORKERS: warps, and registers, of all partitions but the first.
MULTIPLY, LOAD = 232, 40
WORKER_WARPS, WORKER_REGISTERS = gl.constexpr([4, 1]), gl.constexpr([MULTIPLY, LOAD])


@gluon.jit
def _load(descs, rings, ready, free, sizes, low, GATE: gl.constexpr, RANK: gl.constexpr):
    """The warp that loads, step by step of all tiles of this program.

    rings: of x and of weights. ready: barriers of loads into a slot. free: that a slot has been multiplied, and each
    warpgroup's turn. sizes: tiles along rows and columns, and K. low: x A^T and B of adapters, which are more steps of
    K, and where parts of the outputs end. What lies beyond B's columns a tensor map reads as zeros.
    """
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    BOX: gl.constexpr = rings[1].shape[1]
    tiles_m, tiles_n, depth = sizes
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)  # the phase before the first: every slot is free
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        for k in range(0, depth, BLOCK_K):
            slot, phase = _load_step(descs, [m * BLOCK_M, k], [n * BOX, k], slot, phase, rings, ready, free, GATE)
        if RANK > 0:
            part = (n * BOX >= low[3]).to(gl.int32) + (n * BOX >= low[4]).to(gl.int32)
            for k in range(0, RANK, BLOCK_K):
                place = [m * BLOCK_M, part * RANK + k]
                slot, phase = _load_step(low, place, [n * BOX, k], slot, phase, rings, ready, free, GATE)


@gluon.jit
def _load_step(descs, x_place, w_place, slot, phase, rings, ready, free, GATE: gl.constexpr):
    """One step of K into a slot of the rings, once that is free. Returns the next slot and its phase."""
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    BOX: gl.constexpr = rings[1].shape[1]
    BLOCK_N: gl.constexpr = 2 * BOX if GATE else BOX
    STEP_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * rings[0].dtype.primitive_bitwidth // 8
    mbarrier.wait(free[0].index(slot), phase)
    bar = ready.index(slot)
    mbarrier.expect(bar, STEP_BYTES)
    start_load(descs[0], x_place, bar, rings[0].index(slot))
    if GATE:
        start_load(descs[1], w_place, bar, rings[1].index(2 * slot))
        start_load(descs[2], w_place, bar, rings[1].index(2 * slot + 1))
    else:
        start_load(descs[1], w_place, bar, rings[1].index(slot))
    slot += 1
    if slot == STAGES:
        slot = gl.to_tensor(0)
        phase = 1 - phase
    return slot, phase


@gluon.jit
def _whole(ring):
    """The ring of weights, with a gate's rows in the same buffer."""
    BLOCK_N: gl.constexpr = ring.shape[0] * ring.shape[1] // STAGES
    if ring.shape[1] == BLOCK_N:
        return ring
    elif RENAMED:
        return ring.reinterpret(ring.dtype, [STAGES, BLOCK_N, ring.shape[2]], ring.layout)
    else:
        return ring._reinterpret(ring.dtype, [STAGES, BLOCK_N, ring.shape[2]], ring.layout)


@gluon.jit
def _multiply(y_desc, rings, ready, free, out, after, sizes, places, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
              ROUNDED: gl.constexpr, RANK: gl.constexpr, MINE: gl.constexpr):  # fmt: skip
    """A warpgroup, of every other tile of this program. MINE: 0, the one with the first tile, or 1.

    out: each warpgroup's buffers of pieces.
    """
    xs, ws = rings[0], _whole(rings[1])
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    BLOCK_N: gl.constexpr = ws.shape[1]
    SUM: gl.constexpr = gl.int32 if xs.dtype == gl.int8 else gl.float32
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 256 // xs.dtype.primitive_bitwidth])
    PIECES: gl.constexpr = BLOCK_N // WIDTH
    WRITTEN: gl.constexpr = PIECES // 2 if GATE else PIECES
    PENDING: gl.constexpr = BUFFERS - 1 if WRITTEN % BUFFERS == 0 else 0
    tiles_m, tiles_n, depth = sizes
    programs, steps = gl.num_programs(0), gl.cdiv(depth, BLOCK_K) + gl.cdiv(RANK, BLOCK_K)
    at, turn = steps * MINE, gl.to_tensor(0)  # steps of the ring before this tile, and the phase of the next turn
    for tile in range(gl.program_id(0) + MINE * programs, tiles_m * tiles_n, 2 * programs):
        if tile >= programs:  # the other warpgroup's comes before, or phases of `ready` could be taken for earlier ones
            mbarrier.wait(free[1].index(MINE), turn)
            turn = 1 - turn
        slot, phase, last = at % STAGES, at // STAGES & 1, at % STAGES
        at += 2 * steps
        acc = gl.zeros([BLOCK_M, BLOCK_N], SUM, MMA)
        for step in range(0, steps):
            mbarrier.wait(ready.index(slot), phase)
            acc = warpgroup_mma(xs.index(slot), ws.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before this one
            mbarrier.arrive(free[0].index(last), pred=step > 0)
            last = slot
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = 1 - phase
        mbarrier.arrive(free[1].index(1 - MINE))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free[0].index(last))
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        pieces = column_blocks(acc, PIECES)
        for piece in gl.static_range(WRITTEN):
            buffer, column = out[MINE].index(piece % BUFFERS), (n * WRITTEN + piece) * WIDTH
            y, other = placed(pieces[piece]), placed(pieces[(piece + WRITTEN) % PIECES])
            y = finished(y, other, m * BLOCK_M, column, after, places, y_desc.dtype, GATE, ACTIVATION, ROUNDED)
            tma.store_wait(PENDING)  # what was in this buffer has been read
            all_threads()
            buffer.store(y)
            fence_async_shared()
            all_threads()
            start_store(y_desc, [m * BLOCK_M, column], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize="rows eighths depth modulation_rise residual_rise share first second".split())
def hopper_gemm_kernel(
    x_desc, w_desc, u_desc, y_desc, low_desc, b_desc, c_desc, after, rows, eighths, depth, modulation_rise,
    residual_rise, share, first, second, GATE: gl.constexpr, ACTIVATION: gl.constexpr, ROUNDED: gl.constexpr,
    RANK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """eighths: of the outputs. modulation_rise, residual_rise: eighths of the numbers from row to row. So the compiler
    sees how they are aligned. share: rows of x to a row of modulation. low_desc: x A^T of adapters; b_desc, c_desc:
    their B; first, second: where parts of the outputs end; RANK: 0 for none.
    """
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = 2 * BOX if GATE else BOX
    DTYPE: gl.constexpr = x_desc.dtype
    xs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(DTYPE, [STAGES * BLOCK_N // BOX, BOX, BLOCK_K], w_desc.layout)
    out_first = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BLOCK_M, WIDTH], y_desc.layout)
    out_second = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, BLOCK_M, WIDTH], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    multiplied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(2):
        mbarrier.init(turns.index(warpgroup), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(multiplied.index(slot), count=1)
    fence_async_shared()
    all_threads()
    sizes = gl.cdiv(rows, BLOCK_M), gl.cdiv(eighths * (16 if GATE else 8), BLOCK_N), depth
    places = rows, eighths, modulation_rise, residual_rise, share
    descs, rings, free, out = (x_desc, w_desc, u_desc), (xs, ws), (multiplied, turns), (out_first, out_second)
    low = low_desc, b_desc, c_desc, first, second
    # Written out: a variable would hold tensors of the constants.
    gl.warp_specialize(
        [
            (_multiply, (y_desc, rings, ready, free, out, after, sizes, places, GATE, ACTIVATION, ROUNDED, RANK,
                         FIRST)),
            (_multiply, (y_desc, rings, ready, free, out, after, sizes, places, GATE, ACTIVATION, ROUNDED, RANK,
                         SECOND)),
            (_load, (descs, rings, ready, free, sizes, low, GATE, RANK)),
        ],
        WORKER_WARPS, WORKER_REGISTERS,
    )  # fmt: skip


def hopper_gemm(x, weight, bias=None, *, low_rank=None, rounded=False, fast=False, out=None, **after):
    """Same arguments and result as the reference."""
    epilogue = Epilogue(bias, **after)
    modulation, residual = epilogue.modulation, epilogue.residual
    gate, quantized = epilogue.up is not None, isinstance(x, QuantizedRows)
    numbers, *weights = (one.data if quantized else one.detach() for one in (x, *epilogue.weights(weight)))
    (n, depth), rows, step = weights[0].shape, numbers.numel() // numbers.shape[-1], STEP // numbers.element_size()
    tiles = -(-rows // HEIGHT) * -(-n * (2 if gate else 1) // COLUMNS)
    y = torch.empty((*numbers.shape[:-1], n), device=numbers.device, dtype=x.dtype) if out is None else out
    box = COLUMNS // 2 if gate else COLUMNS
    described = [
        _described(matrix, height, width)
        for matrix, height, width in (
            (_matrix(numbers), HEIGHT, step),
            (weights[0], box, step),
            (weights[-1], box, step),
            (_matrix(y), HEIGHT, WIDTH.value),
        )
    ]
    rank = 0 if low_rank is None else low_rank.rank
    *low, first, second = (*described[:3], 0, 0) if low_rank is None else _low_rank(x, low_rank, box, step)
    scales = [x.scales, *(one.scales for one in epilogue.weights(weight))] if quantized else [None]
    launch(
        hopper_gemm_kernel, (min(tiles, multiprocessors(numbers.device)),),
        *described, *low, _finish(epilogue, scales), rows, n // 8, depth,
        1 if modulation is None else modulation.stride(0) // 8,
        1 if residual is None else _matrix(residual).stride(0) // 8,
        1 if modulation is None else rows // len(modulation), first, second, **epilogue.flags, ROUNDED=rounded,
        RANK=rank, num_warps=4,
        **({"enable_fp_fusion": False} if rounded else {}),  # or modulation and residual would be rounded together
    )  # fmt: skip
    return y


def _low_rank(x: torch.Tensor, term: LowRankTerm, box: int, step: int) -> tuple:
    """x A^T, which is computed here, and B of the weight and of the gate, described; where parts end."""
    inner = _matrix(term.inner(x))
    gate_up = term.up if term.gate_up is None else term.gate_up
    heights = (inner, HEIGHT), (term.up, box), (gate_up, box)
    first, second = (*term.ends, *(term.ends[-1],) * 2)[:2]
    return *(_described(one, height, step) for one, height in heights), first, second


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """(..., N) of evenly spaced rows as (M, N), a view."""
    return tensor.view(-1, tensor.shape[-1])


def _described(matrix: torch.Tensor, height: int, width: int) -> TensorDescriptor:
    kind = {1: gl.int8, 2: gl.float16}[matrix.element_size()]
    layout = gl.NVMMASharedLayout.get_default_for([height, width], kind)
    strides = [matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1], 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [height, width], layout)


def _finish(epilogue: Epilogue, scales: list) -> FinishArguments:
    shifts, of_weights = epilogue.arguments, scales[1:] or [None]
    return FinishArguments(
        shifts.bias, shifts.up_bias, scales[0], of_weights[0], of_weights[-1], epilogue.modulation, epilogue.residual,
        shifts.scale,
    )  # fmt: skip
