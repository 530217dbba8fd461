"""A persistent product of 16-bit or 8-bit operands by specialized warps, for Hopper.

A program is a warp that loads and two warpgroups that multiply. The warp brings steps of K through the tensor memory
accelerator into a ring, of one tile after the other, as soon as a slot is free. The warpgroups take tiles in turn:
while one writes, the other has the tensor cores, so that what follows the sums takes none of their time. Or each
multiplies half the rows of every tile, which may then be wider and reads less; the first begins a few steps before the
second and stays that far ahead.

A tile is written in pieces of 64 columns, through shared memory. With a gate a tile holds as many rows of its weight as
of the other, side by side, so that one instruction multiplies both and a thread has what belongs together. Tiles of a
last round can be split along K: sums of parts go to memory, and whoever is last adds them up, in order.

Serves rows in 16 bits, or in 8 bits with scales by row, on compute capability 9.0. Nothing uses it yet.
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

from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.hopper.finish_triton import FinishArguments, finished, in_pieces, offsets, placed, sum_of_parts
from accel_kernels.gemm.hopper.tiles import PIECE, SLOTS, STEP, HopperTile, by_size, split
from accel_kernels.gemm.int8_wgmma_triton import all_threads, start_load
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.op import multiprocessors
from accel_kernels.warmup import launch

# Names since Triton 3.7, and until then.
start_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
WIDTH, BUFFERS = gl.constexpr(PIECE), gl.constexpr(SLOTS)
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
# Registers of a thread that multiplies and of one that loads: of two warpgroups and of a third, in steps of 8, at most
# 65536. WORKERS: warps, and registers, of all partitions but the first.
MULTIPLY, LOAD = 232, 40
WORKER_WARPS, WORKER_REGISTERS = gl.constexpr([4, 1]), gl.constexpr([MULTIPLY, LOAD])


@gluon.jit
def _item(item, sizes, BLOCK_K: gl.constexpr):
    """Row and column of a tile, where along K an item of work on it begins and ends, and which of its parts that is.

    sizes: tiles along rows and columns; K; rows of tiles in a group; the lead; tiles that are an item each; into how
    many the others are split. Items of one tile are neighbors.
    """
    tiles_m, tiles_n, depth, group, _, whole, parts = sizes
    over = gl.maximum(item - whole, 0)
    tile, part = gl.minimum(item, whole) + over // parts, over % parts
    first = tile // (group * tiles_n) * group
    height = gl.minimum(tiles_m - first, group)
    m, n = first + tile % (group * tiles_n) % height, tile % (group * tiles_n) // height
    share = gl.cdiv(gl.cdiv(depth, BLOCK_K), parts) * BLOCK_K
    end = gl.minimum(part * share + share, depth)
    if item < whole:
        end = depth
    return m, n, part * share, end, part


@gluon.jit
def _items(sizes):
    tiles_m, tiles_n, _, _, _, whole, parts = sizes
    return whole + (tiles_m * tiles_n - whole) * parts


@gluon.jit
def _load(descs, rings, ready, free, sizes, GATE: gl.constexpr, TURNS: gl.constexpr):
    """The warp that loads, step by step of all tiles of this program.

    rings: of the first warpgroup's rows of x, of the second's, and of weights. ready: barriers of loads into a slot.
    free: of each warpgroup, that it is done with a slot, and that it is its turn. sizes: as of `_item`. TURNS: whether
    warpgroups take tiles in turn; then the first ring of x and the first barriers are for both.
    """
    STAGES: gl.constexpr = rings[0].shape[0]
    HEIGHT: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    BOX: gl.constexpr = rings[2].shape[1]
    COLUMNS: gl.constexpr = 2 * BOX if GATE else BOX
    ROWS: gl.constexpr = HEIGHT if TURNS else 2 * HEIGHT
    STEP_BYTES: gl.constexpr = (ROWS + COLUMNS) * BLOCK_K * rings[0].dtype.primitive_bitwidth // 8
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)  # the phase before the first: every slot is free
    for item in range(gl.program_id(0), _items(sizes), gl.num_programs(0)):
        m, n, begin, end, _ = _item(item, sizes, BLOCK_K)
        for k in range(begin, end, BLOCK_K):
            mbarrier.wait(free[0].index(slot), phase)
            if not TURNS:
                mbarrier.wait(free[1].index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, STEP_BYTES)
            start_load(descs[0], [m * ROWS, k], bar, rings[0].index(slot))
            if GATE:
                start_load(descs[1], [n * BOX, k], bar, rings[2].index(2 * slot))
                start_load(descs[2], [n * BOX, k], bar, rings[2].index(2 * slot + 1))
            else:
                start_load(descs[1], [n * BOX, k], bar, rings[2].index(slot))
            if not TURNS:
                start_load(descs[0], [m * ROWS + HEIGHT, k], bar, rings[1].index(slot))
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = 1 - phase


@gluon.jit
def _whole(ring, COLUMNS: gl.constexpr):
    """The ring of weights, with a gate's rows in the same buffer."""
    STAGES: gl.constexpr = ring.shape[0] * ring.shape[1] // COLUMNS
    if ring.shape[1] == COLUMNS:
        return ring
    elif RENAMED:
        return ring.reinterpret(ring.dtype, [STAGES, COLUMNS, ring.shape[2]], ring.layout)
    else:
        return ring._reinterpret(ring.dtype, [STAGES, COLUMNS, ring.shape[2]], ring.layout)


@gluon.jit
def _multiply(y_desc, rings, ready, free, out, after, shared, sizes, places, GATE: gl.constexpr, KIND: gl.constexpr,
              ROUNDED: gl.constexpr, PROMOTED: gl.constexpr, TURNS: gl.constexpr, COLUMNS: gl.constexpr,
              MINE: gl.constexpr):  # fmt: skip
    """A warpgroup: its half of the rows of all tiles of this program, or all rows of every other. MINE: 0, the one that
    is ahead, or 1.

    out: each warpgroup's buffers of pieces. shared: sums of parts of tiles, and how many parts are there, or both None.
    PROMOTED: whether the sums of a step are added to the others in registers.
    """
    lead, whole, parts = sizes[4], sizes[5], sizes[6]
    xs, ws, mine = rings[MINE], _whole(rings[2], COLUMNS), free[0 if TURNS else MINE]
    STAGES: gl.constexpr = xs.shape[0]
    HEIGHT: gl.constexpr = xs.shape[1]
    BLOCK_K: gl.constexpr = xs.shape[2]
    INTEGERS: gl.constexpr = xs.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INTEGERS else gl.float32
    # The hardware takes 256 columns of integers, the compiler refuses them (Triton 3.6 and 3.9).
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1],
        [16, min(COLUMNS, 128) if INTEGERS else COLUMNS, 256 // xs.dtype.primitive_bitwidth],
    )  # fmt: skip
    PIECES: gl.constexpr = COLUMNS // WIDTH
    WRITTEN: gl.constexpr = PIECES // 2 if GATE else PIECES
    PENDING: gl.constexpr = BUFFERS - 1 if WRITTEN % BUFFERS == 0 else 0
    items, programs = _items(sizes), gl.num_programs(0)
    first, stride = gl.program_id(0), programs
    if TURNS:
        first, stride = first + MINE * programs, 2 * programs
    elif MINE == 1:
        _, _, begin, end, _ = _item(first, sizes, BLOCK_K)
        if (lead > 0) & (lead * BLOCK_K <= end - begin):
            mbarrier.wait(free[0].index(lead - 1), 0)
    at, turn = gl.to_tensor(0), gl.to_tensor(0)  # steps of the ring that lie behind, and the phase of the next turn
    for item in range(first, items, stride):
        if TURNS:
            if item >= programs:  # the other warpgroup's item comes before this one
                _, _, begin, end, _ = _item(item - programs, sizes, BLOCK_K)
                at += gl.cdiv(end - begin, BLOCK_K)
                mbarrier.wait(free[2].index(MINE), turn)  # or phases of `ready` could be taken for those before them
                turn = 1 - turn
        m, n_tile, begin, end, part = _item(item, sizes, BLOCK_K)
        slot, phase, last = at % STAGES, at // STAGES & 1, at % STAGES
        at += gl.cdiv(end - begin, BLOCK_K)
        acc = gl.zeros([HEIGHT, COLUMNS], SUM, MMA)
        for k in range(begin, end, BLOCK_K):
            mbarrier.wait(ready.index(slot), phase)
            w = ws.index(slot).permute((1, 0))
            if PROMOTED:
                step = gl.zeros([HEIGHT, COLUMNS], SUM, MMA)
                step = warpgroup_mma(xs.index(slot), w, step, use_acc=False, is_async=True)
                step = warpgroup_mma_wait(0, deps=(step,))
                mbarrier.arrive(mine.index(slot))
                acc += step
            else:
                acc = warpgroup_mma(xs.index(slot), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before this one
                mbarrier.arrive(mine.index(last), pred=k > begin)
            last = slot
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = 1 - phase
        if TURNS:
            mbarrier.arrive(free[2].index(1 - MINE))
        if not PROMOTED:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(mine.index(last))
        row, column = (m if TURNS else 2 * m + MINE) * HEIGHT, n_tile * (WRITTEN * WIDTH)
        pieces = in_pieces(acc, PIECES)
        done, sums = True, None
        if shared[0] is not None:
            split = (item - part - whole) // parts * (1 if TURNS else 2) + (0 if TURNS else MINE)
            sums = shared[0] + split.to(gl.int64) * (parts * HEIGHT * COLUMNS)
            if item >= whole:
                for piece in gl.static_range(PIECES):
                    place = sums + (part * PIECES + piece) * (HEIGHT * WIDTH) + offsets(HEIGHT, WIDTH)
                    gl.store(place, placed(pieces[piece]))
                all_threads()
                done = gl.atomic_add(shared[1] + split, 1, sem="acq_rel") == parts - 1
        if done:
            for piece in gl.static_range(WRITTEN):
                buffer = out[MINE].index(piece % BUFFERS)
                y, other = placed(pieces[piece]), placed(pieces[(piece + WRITTEN) % PIECES])
                if shared[0] is not None:
                    if item >= whole:
                        y = sum_of_parts(sums + piece * (HEIGHT * WIDTH), y, parts, PIECES)
                        if GATE:
                            other = sum_of_parts(sums + (piece + WRITTEN) * (HEIGHT * WIDTH), other, parts, PIECES)
                y = finished(y, other, row, column + piece * WIDTH, after, places, y_desc.dtype, GATE, KIND, ROUNDED)
                tma.store_wait(PENDING)  # what was in this buffer has been read
                all_threads()
                buffer.store(y)
                fence_async_shared()
                all_threads()
                start_store(y_desc, [row, column + piece * WIDTH], buffer)
    tma.store_wait(0)


RUNTIME = "rows eighths depth modulation_rise residual_rise share group lead whole parts"


@gluon.jit(do_not_specialize=RUNTIME.split())
def hopper_gemm_kernel(
    x_desc, w_desc, u_desc, y_desc, after, rows, eighths, depth, modulation_rise, residual_rise, share, group, lead,
    whole, parts, part_ptr, ticket_ptr, GATE: gl.constexpr, KIND: gl.constexpr, ROUNDED: gl.constexpr,
    PROMOTED: gl.constexpr, TURNS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """eighths: of the outputs. modulation_rise, residual_rise: eighths of the numbers from row to row. So the compiler
    sees how they are aligned. share: rows of x to a row of modulation. group, lead: as of `HopperTile`. whole: tiles
    that one program multiplies each; the others are split into `parts`, whose sums meet in part_ptr.
    """
    HEIGHT: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    BOX: gl.constexpr = w_desc.block_type.shape[0]
    DTYPE: gl.constexpr = x_desc.dtype
    upper = gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, BLOCK_K], x_desc.layout)
    lower = upper
    if not TURNS:
        lower = gl.allocate_shared_memory(DTYPE, [STAGES, HEIGHT, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(DTYPE, [STAGES * COLUMNS // BOX, BOX, BLOCK_K], w_desc.layout)
    out_upper = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, HEIGHT, WIDTH], y_desc.layout)
    out_lower = gl.allocate_shared_memory(y_desc.dtype, [BUFFERS, HEIGHT, WIDTH], y_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_upper = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free_lower = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for warpgroup in gl.static_range(2):
        mbarrier.init(turns.index(warpgroup), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free_upper.index(slot), count=1)
        mbarrier.init(free_lower.index(slot), count=1)
    fence_async_shared()
    all_threads()
    sizes = (
        gl.cdiv(rows, HEIGHT if TURNS else 2 * HEIGHT),
        gl.cdiv(eighths * (16 if GATE else 8), COLUMNS),
        depth,
        group,
        lead,
        whole,
        parts,
    )
    places = (rows, eighths, modulation_rise, residual_rise, share)
    descs, rings = (x_desc, w_desc, u_desc), (upper, lower, ws)
    free, out, shared = (free_upper, free_lower, turns), (out_upper, out_lower), (part_ptr, ticket_ptr)
    # Written out: a variable would hold tensors of the constants.
    gl.warp_specialize(
        [
            (_multiply, (y_desc, rings, ready, free, out, after, shared, sizes, places, GATE, KIND, ROUNDED, PROMOTED,
                         TURNS, COLUMNS, FIRST)),
            (_multiply, (y_desc, rings, ready, free, out, after, shared, sizes, places, GATE, KIND, ROUNDED, PROMOTED,
                         TURNS, COLUMNS, SECOND)),
            (_load, (descs, rings, ready, free, sizes, GATE, TURNS)),
        ],
        WORKER_WARPS, WORKER_REGISTERS,
    )  # fmt: skip


def hopper_gemm(x, weight, bias=None, *, rounded=False, fast=False, tile=None, **after):
    """Same arguments and result as the reference. tile: a HopperTile that fits, else one by size."""
    epilogue = Epilogue(bias, **after)
    modulation, residual = epilogue.modulation, epilogue.residual
    gate, quantized = epilogue.up is not None, isinstance(x, QuantizedRows)
    numbers, *weights = (one.data if quantized else one.detach() for one in (x, *epilogue.weights(weight)))
    (n, depth), rows = weights[0].shape, numbers.numel() // numbers.shape[-1]
    step, promoted = STEP // numbers.element_size(), numbers.dtype == torch.float8_e4m3fn and not fast
    columns, steps, processors = n * (2 if gate else 1), -(-depth // step), multiprocessors(numbers.device)
    tile = tile or by_size(rows, columns, steps, gate, promoted, processors)
    box, tiles = tile.columns // 2 if gate else tile.columns, tile.count(rows, columns)
    whole, parts = split(tiles, steps, processors, tile.parts)
    y = torch.empty((*numbers.shape[:-1], n), device=numbers.device, dtype=x.dtype)
    described = [
        _described(matrix, height, width)
        for matrix, height, width in (
            (_matrix(numbers), tile.height, step),
            (weights[0], box, step),
            (weights[-1], box, step),
            (y.view(rows, n), tile.height, PIECE),
        )
    ]
    scales = [x.scales, *(one.scales for one in epilogue.weights(weight))] if quantized else [None]
    launch(
        hopper_gemm_kernel, (min(whole + (tiles - whole) * parts, processors),),
        *described, _finish(epilogue, scales), rows, n // 8, depth,
        1 if modulation is None else modulation.stride(0) // 8,
        1 if residual is None else _matrix(residual).stride(0) // 8,
        1 if modulation is None else rows // len(modulation), tile.group, tile.lead, whole, parts,
        *_shared(tile, tiles - whole, parts, numbers), **epilogue.flags, ROUNDED=rounded, PROMOTED=promoted,
        TURNS=bool(tile.turns), COLUMNS=tile.columns, STAGES=tile.stages, num_warps=4,
        **({"enable_fp_fusion": False} if rounded else {}),  # or modulation and residual would be rounded together
    )  # fmt: skip
    return y


def _shared(tile: HopperTile, many: int, parts: int, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Room for sums of the parts of so many tiles, and zeros: how many parts of each half are there."""
    if parts == 1:
        return None, None
    kind = torch.int32 if x.dtype == torch.int8 else torch.float32
    sums = torch.empty(many * parts * tile.rows * tile.columns, device=x.device, dtype=kind)
    return sums, torch.zeros(2 * many, device=x.device, dtype=torch.int32)


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
