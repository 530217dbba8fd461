"""Many rows times a weight in blocks, by specialized warps, for Hopper: some unpack what others multiply.

A program is a warp that loads x, two warpgroups that unpack the weight and two that multiply, half of a tile's rows of
x each. Those that unpack take spans of 256 columns in turn, each into a buffer of its own in shared memory. With a gate
a tile holds rows of both weights, as in `hopper_gemm_triton`, which also says how a tile is written.
"""

from typing import NamedTuple

import torch
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from accel_kernels.device import Feature, has, interpreted, multiprocessors
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.unpacking_triton import UNPACKING, format_flags, unpack_blocks
from accel_kernels.gemm.epilogue_triton import tile_place
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.gluon_triton import RENAMED, all_threads, column_blocks, start_load, tensor_map
from accel_kernels.gemm.hopper.finish_triton import finish_arguments, finished, placed
from accel_kernels.gemm.hopper.hopper_gemm import mapped
from accel_kernels.gemm.hopper.hopper_gemm_triton import matrix
from accel_kernels.gemm.hopper.load_triton import GROUP
from accel_kernels.gemm.quantized_weight import MOST_BLOCK_ROWS, MOST_UNPACKED_ROWS, WeightFormat
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

SPAN = gl.constexpr(256)  # columns that are unpacked at a time: the largest block
STEP = gl.constexpr(64)  # columns of a step of the products, 128 bytes: a tensor map's widest swizzle
MOST = gl.constexpr(64)  # rows of a weight that are unpacked at a time
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
ONE, TWO = gl.constexpr(1), gl.constexpr(2)
FEW, FRAGMENTS = 32, ("table", "runs", "sixes", "affine", "affine-32")  # rows up to which fragments of these are faster


class BlockGemmTile(NamedTuple):
    """Rows of x, and of the weight, its gate's included, to a program at a time."""

    rows: int
    columns: int


@constexpr_function
def chunk_layout(format, rows):
    """(rows, SPAN): what is joined out of one byte is a thread's."""
    join = 16 if format[:2] == "IQ" or format[-2:] in ("_0", "_1") else 32
    row = 6 - join // 8  # 4 or 2: of eight lanes none writes to a bank of another
    columns = [[0, 1], [0, 2], [0, 4], [0, join], [0, 64], [0, 128]]
    lanes = [[0, 8], [0, 48 - join], [row, 0], [1, 0], [6 - row, 0]]
    more = [[32, 0]] if rows > 32 else []
    return gl.DistributedLinearLayout(columns + more, lanes, [[8, 0], [16, 0]], [], [rows, 256])


@constexpr_function
def workers(rows):
    """Warps of each partition but the first, and registers of a thread, by the rows of x of a tile. Sums of 256 rows
    leave registers for one warpgroup that unpacks.
    """
    return ([4, 4, 1], [184, 112, 24]) if rows > 128 else ([4, 4, 4, 1], [112, 112, 112, 24])


@gluon.jit
def _ask_for(weight, up, block, n, span, BLOCKS: gl.constexpr, COLUMNS: gl.constexpr, BYTES: gl.constexpr,
             ROWS: gl.constexpr, OWN: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Has memory bring a span of a tile to the L2 cache, while the one before it is unpacked."""
    SIZE: gl.constexpr = SPAN // COLUMNS * BYTES
    place = gl.arange(0, 32 * num_warps, layout=gl.BlockedLayout([1], [32], [num_warps], [0])) % ROWS
    row = gl.minimum(block * OWN + place % OWN, n - 1).to(gl.int64) * (BLOCKS * BYTES)
    first = gl.where(place < OWN, (weight.data + row).to(gl.int64), (up.data + row).to(gl.int64))
    for line in gl.static_range(SIZE // 128 + 1):
        at = gl.minimum(span * SIZE + min(line * 128, SIZE - 1), BLOCKS * BYTES - 1)  # the last span may be cut short
        gl.inline_asm_elementwise(
            "{prefetch.global.L2 [$1]; mov.b32 $0, 0;}", "=r,l", [first + at], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _load(x_desc, xs, ready, free, sizes):
    """The warp that loads: of each step both halves of the tile's rows."""
    STAGES: gl.constexpr = xs.shape[0] // 2
    HALF: gl.constexpr = xs.shape[1]
    tiles_m, tiles_n, spans = sizes
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)  # the phase before the first: every slot is free
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, _ = tile_place(tile, tiles_m, tiles_n, GROUP)
        for k in range(0, spans * SPAN, STEP):
            mbarrier.wait(free.index(slot), phase)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * x_desc.block_type.nbytes)
            start_load(x_desc, [m * 2 * HALF, k], bar, xs.index(2 * slot))
            start_load(x_desc, [m * 2 * HALF + HALF, k], bar, xs.index(2 * slot + 1))
            slot += 1
            if slot == STAGES:
                slot = gl.to_tensor(0)
                phase = 1 - phase


@gluon.jit
def _unpack(weight, up, ws, ready, free, sizes, n, BLOCKS: gl.constexpr, FORMAT: gl.constexpr, COLUMNS: gl.constexpr,
            COMPUTE: gl.constexpr, GATE: gl.constexpr, BYTES: gl.constexpr, MINE: gl.constexpr,
            SHARES: gl.constexpr):  # fmt: skip
    """A warpgroup that unpacks all spans of all tiles, or every other."""
    ROWS: gl.constexpr = ws.shape[1]
    OWN: gl.constexpr = ROWS // 2 if GATE else ROWS  # of one weight
    CHUNK: gl.constexpr = min(OWN, MOST)
    tiles_m, tiles_n, spans = sizes
    mine = gl.cdiv(tiles_m * tiles_n - gl.program_id(0), gl.num_programs(0)) * spans
    for at in range(MINE, mine, SHARES):
        next = at + SHARES
        _, block = tile_place(gl.program_id(0) + at // spans * gl.num_programs(0), tiles_m, tiles_n, GROUP)
        _, later = tile_place(gl.program_id(0) + next // spans * gl.num_programs(0), tiles_m, tiles_n, GROUP)
        _ask_for(weight, up, later, n, next % spans, BLOCKS, COLUMNS, BYTES, ROWS, OWN, 4)
        buffer = at % 2
        mbarrier.wait(free.index(buffer), (at // 2 & 1) ^ 1)
        for chunk in gl.static_range(ROWS // CHUNK):
            of = weight
            if chunk * CHUNK >= OWN:
                of = up
            place = block * OWN + chunk * CHUNK % OWN, n - 1, at % spans * (SPAN // COLUMNS), BLOCKS
            values = unpack_blocks(of, place, CHUNK, SPAN // COLUMNS, FORMAT, COMPUTE, False)
            values = gl.set_auto_layout(values, chunk_layout(FORMAT, CHUNK)).to(ws.dtype)
            ws.index(buffer).slice(chunk * CHUNK, CHUNK, 0).store(values)
        fence_async_shared()
        all_threads()
        mbarrier.arrive(ready.index(buffer))


@gluon.jit
def _store(y, y_ptr, row, column, rows, n):
    """Without shared memory, of which x has more so."""
    PLACED: gl.constexpr = y.type.layout
    m_idx = gl.expand_dims(row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, PLACED)), 1)
    n_idx = gl.expand_dims(column + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, PLACED)), 0)
    gl.store(y_ptr + m_idx.to(gl.int64) * n + n_idx, y, mask=(m_idx < rows) & (n_idx < n))


@gluon.jit
def _multiply(y_ptr, rings, ready, free, after, sizes, places, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
              MINE: gl.constexpr):  # fmt: skip
    """A warpgroup that multiplies half of the rows of every tile."""
    xs, ws = rings
    STAGES: gl.constexpr = xs.shape[0] // 2
    HALF: gl.constexpr = xs.shape[1]
    BLOCK_N: gl.constexpr = ws.shape[1]
    PER: gl.constexpr = SPAN // STEP
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    WIDTH: gl.constexpr = min(STEP, BLOCK_N // 2 if GATE else BLOCK_N)
    PIECES: gl.constexpr = BLOCK_N // WIDTH
    WRITTEN: gl.constexpr = PIECES // 2 if GATE else PIECES
    tiles_m, tiles_n, spans = sizes
    slot, phase, last = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    span = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        acc = gl.zeros([HALF, BLOCK_N], gl.float32, MMA)
        for _ in range(spans):
            buffer = span % 2
            mbarrier.wait(ready[1].index(buffer), span // 2 & 1)
            for step in gl.static_range(PER):
                mbarrier.wait(ready[0].index(slot), phase)
                right = ws.index(buffer).slice(step * STEP, STEP, 1).permute((1, 0))
                acc = warpgroup_mma(xs.index(2 * slot + MINE), right, acc, is_async=True)
                if step > 0:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    mbarrier.arrive(free[0].index(last))
                last = slot
                slot += 1
                if slot == STAGES:
                    slot = gl.to_tensor(0)
                    phase = 1 - phase
            # Not after the next span's first step: while that is unpacked, the one behind it could not begin.
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(free[0].index(last))
            mbarrier.arrive(free[1].index(buffer))
            span += 1
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        rows, eighths = places[0], places[1]
        row = m * 2 * HALF + MINE * HALF
        pieces = column_blocks(acc, PIECES)
        for piece in gl.static_range(WRITTEN):
            column = (n * WRITTEN + piece) * WIDTH
            y, other = placed(pieces[piece]), placed(pieces[(piece + WRITTEN) % PIECES])
            y = finished(y, other, row, column, after, places, y_ptr.dtype.element_ty, GATE, ACTIVATION, False)
            _store(y, y_ptr, row, column, rows, eighths * 8)


@gluon.jit(do_not_specialize="rows eighths residual_rise".split())
def block_gemm_kernel(
    x_desc, y_ptr, weight, up, after, rows, eighths, residual_rise, K: gl.constexpr, FORMAT: gl.constexpr,
    COLUMNS: gl.constexpr, COMPUTE: gl.constexpr, PLAIN: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
    BYTES: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x_desc: of half of a tile's rows. eighths, residual_rise: as of `hopper_gemm_kernel`; there is no modulation."""
    HALF: gl.constexpr = x_desc.block_type.shape[0]
    STAGES: gl.constexpr = 384 // HALF  # of x, as many as there is room for
    SPANS: gl.constexpr = (K + SPAN - 1) // SPAN
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, SPAN], gl.float16)
    xs = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, HALF, STEP], x_desc.layout)
    ws = gl.allocate_shared_memory(x_desc.dtype, [2, BLOCK_N, SPAN], LAYOUT)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    unpacked = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    w_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(loaded.index(slot), count=1)
        mbarrier.init(x_free.index(slot), count=2)
    for slot in gl.static_range(2):
        mbarrier.init(unpacked.index(slot), count=1)
        mbarrier.init(w_free.index(slot), count=2)
    fence_async_shared()
    all_threads()
    n = eighths * 8
    sizes = gl.cdiv(rows, 2 * HALF), gl.cdiv(n * (2 if GATE else 1), BLOCK_N), gl.to_tensor(SPANS)
    places = rows, eighths, residual_rise, residual_rise, rows
    rings, ready, free = (xs, ws), (loaded, unpacked), (x_free, w_free)
    BLOCKS: gl.constexpr = K // COLUMNS
    WORKERS: gl.constexpr = workers(2 * HALF)
    # Written out: a variable would hold tensors of the constants.
    if HALF > 64:
        gl.warp_specialize(
            [
                (_multiply, (y_ptr, rings, ready, free, after, sizes, places, GATE, ACTIVATION, FIRST)),
                (_multiply, (y_ptr, rings, ready, free, after, sizes, places, GATE, ACTIVATION, SECOND)),
                (_unpack, (weight, up, ws, unpacked, w_free, sizes, n, BLOCKS, FORMAT, COLUMNS, COMPUTE, GATE, BYTES,
                           FIRST, ONE)),
                (_load, (x_desc, xs, loaded, x_free, sizes)),
            ],
            WORKERS[0], WORKERS[1],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (y_ptr, rings, ready, free, after, sizes, places, GATE, ACTIVATION, FIRST)),
                (_multiply, (y_ptr, rings, ready, free, after, sizes, places, GATE, ACTIVATION, SECOND)),
                (_unpack, (weight, up, ws, unpacked, w_free, sizes, n, BLOCKS, FORMAT, COLUMNS, COMPUTE, GATE, BYTES,
                           FIRST, TWO)),
                (_unpack, (weight, up, ws, unpacked, w_free, sizes, n, BLOCKS, FORMAT, COLUMNS, COMPUTE, GATE, BYTES,
                           SECOND, TWO)),
                (_load, (x_desc, xs, loaded, x_free, sizes)),
            ],
            WORKERS[0], WORKERS[1],
        )  # fmt: skip


def by_specialized_warps(x, weight, norm, up) -> BlockGemmTile | None:
    """The tile for `block_gemm`; None where it cannot take these, or another way was faster on an H100."""
    n, k = weight.shape
    rows, gate = x.numel() // k, up is not None
    if interpreted() or not has(x.device, Feature.WARPGROUPS) or x.dtype == torch.float32:
        return None
    if n % 8 or k % STEP.value or not mapped(x) or (not RENAMED.value and _eight_runs(weight.format)):
        return None
    tile = block_gemm_tile(rows, n, gate, multiprocessors(x.device))
    wide = n * (1 + gate) >= MOST_UNPACKED_ROWS // 2 * multiprocessors(x.device)
    most = MOST_UNPACKED_ROWS if wide else MOST_UNPACKED_ROWS // 2
    return tile if (FEW if weight.format.source in FRAGMENTS else MOST_BLOCK_ROWS) < rows <= most else None


def _eight_runs(format: WeightFormat) -> bool:
    """Whether a byte has bits of eight runs of numbers, whose layout Triton did not find before 3.7."""
    high = getattr(format, "high", None)
    return high is not None and high.bits == 1 and high.run > 1


def block_gemm_tile(rows: int, n: int, gate: bool, processors: int) -> BlockGemmTile:
    """Of those that leave multiprocessors idle for the least time, the widest."""
    height = 128 if rows <= 128 else 256
    of_x, n = cdiv(rows, height), n * (2 if gate else 1)

    def time(columns: int) -> float:
        return cdiv(of_x * cdiv(n, columns), processors) * (columns + 24)

    return BlockGemmTile(height, min((128, 64) if gate else (128, 64, 32), key=time))


def block_gemm(x, weight, norm, epilogue, tile, y):
    """Writes what `quantized_linear` returns into y."""
    n, k = weight.shape
    if norm is not None:
        x = apply_norm(x, norm)
    rows, gate, residual = x.numel() // k, epilogue.up is not None, epilogue.residual
    tiles = cdiv(rows, tile.rows) * cdiv(n * (2 if gate else 1), tile.columns)
    launch(
        block_gemm_kernel, (min(tiles, multiprocessors(x.device)),),
        tensor_map(matrix(x), tile.rows // 2, STEP.value), y, BlockArguments.of(weight),
        BlockArguments.of(epilogue.up if gate else weight), finish_arguments(epilogue), rows, n // 8,
        1 if residual is None else matrix(residual).stride(0) // 8, K=k, **format_flags(weight), **epilogue.flags,
        BYTES=weight.format.bytes, BLOCK_N=tile.columns, num_warps=4, **UNPACKING,
    )  # fmt: skip
