"""The warp of `hopper_gemm` that brings steps of K into shared memory, tile after tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from accel_kernels.gemm.epilogue_triton import tile_place
from accel_kernels.gemm.gluon_triton import start_load

GROUP = gl.constexpr(16)  # rows of tiles that walk along the columns together


@gluon.jit
def load(descs, rings, ready, free, sizes, low, GATE: gl.constexpr, RANK: gl.constexpr, EXTRA: gl.constexpr,
         TOGETHER: gl.constexpr):  # fmt: skip
    """The warp that loads, step by step of all tiles of this program.

    rings: of x, of weights, of those of the columns beyond, of A, and of B of either. ready: barriers of loads into a
    slot, and of B. free: that a slot has been multiplied, each warpgroup's turn, and that B has been. sizes: tiles
    along rows and columns, and K. low: B of adapters, and x A^T, which are more steps of K unless TOGETHER; and where
    parts of the outputs end. What lies beyond B's columns a tensor map reads as zeros.
    """
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    BOX: gl.constexpr = rings[1].shape[1]
    WIDE: gl.constexpr = BOX + EXTRA
    tiles_m, tiles_n, depth = sizes
    b_descs, first, second = low
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)  # the phase before the first: every slot is free
    mine, turn = gl.to_tensor(0), gl.to_tensor(1)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_place(tile, tiles_m, tiles_n, GROUP)
        part = (n * WIDE >= first).to(gl.int32) + (n * WIDE >= second).to(gl.int32)
        for k in range(0, depth, BLOCK_K):
            places = [m * BLOCK_M, k], [n * WIDE, k], [n * WIDE + BOX, k], [part * RANK, k]
            slot, phase = _load_step(descs, places, slot, phase, rings, ready[0], free[0], GATE, EXTRA, TOGETHER)
        if TOGETHER:
            bar = ready[1].index(mine)
            mbarrier.wait(free[2].index(mine), turn)
            mbarrier.expect(bar, ((2 if GATE else 1) * BOX + EXTRA) * RANK * 2)
            if GATE:
                start_load(b_descs[1], [n * WIDE, 0], bar, rings[4].index(2 * mine))
                start_load(b_descs[2], [n * WIDE, 0], bar, rings[4].index(2 * mine + 1))
            else:
                start_load(b_descs[1], [n * WIDE, 0], bar, rings[4].index(mine))
            if EXTRA > 0:
                start_load(b_descs[3], [n * WIDE + BOX, 0], bar, rings[5].index(mine))
            turn = gl.where(mine == 1, 1 - turn, turn)
            mine = 1 - mine
        elif RANK > 0:
            for k in range(0, RANK, BLOCK_K):
                places = [m * BLOCK_M, part * RANK + k], [n * WIDE, k], [n * WIDE + BOX, k], [0, 0]
                slot, phase = _load_step(b_descs, places, slot, phase, rings, ready[0], free[0], GATE, EXTRA, False)


@gluon.jit
def _load_step(descs, places, slot, phase, rings, ready, free, GATE: gl.constexpr, EXTRA: gl.constexpr,
               TOGETHER: gl.constexpr):  # fmt: skip
    """One step of K into a slot of the rings, once that is free. Returns the next slot and its phase."""
    STAGES: gl.constexpr = rings[0].shape[0]
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    BOX: gl.constexpr = rings[1].shape[1]
    BLOCK_N: gl.constexpr = 2 * BOX if GATE else BOX
    MORE: gl.constexpr = EXTRA + (rings[3].shape[1] if TOGETHER else 0)
    STEP_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N + MORE) * BLOCK_K * rings[0].dtype.primitive_bitwidth // 8
    mbarrier.wait(free.index(slot), phase)
    bar = ready.index(slot)
    mbarrier.expect(bar, STEP_BYTES)
    start_load(descs[0], places[0], bar, rings[0].index(slot))
    if GATE:
        start_load(descs[1], places[1], bar, rings[1].index(2 * slot))
        start_load(descs[2], places[1], bar, rings[1].index(2 * slot + 1))
    else:
        start_load(descs[1], places[1], bar, rings[1].index(slot))
    if EXTRA > 0:
        start_load(descs[3], places[2], bar, rings[2].index(slot))
    if TOGETHER:
        start_load(descs[4], places[3], bar, rings[3].index(slot))
    slot += 1
    if slot == STAGES:
        slot = gl.to_tensor(0)
        phase = 1 - phase
    return slot, phase
