"""A weight in blocks of few bits times 17 rows and more, for Hopper, as `skinny_wgmma_triton` has it.

A warp unpacks 16 rows of a unit of `units_triton` into values, rounded as the library rounds them. Its warpgroup
multiplies them with a tile of x out of shared memory. x lies in the order of columns of the factor, see `place_rows`.
A step is a set of every row of a tile. Programs share the steps of all tiles evenly. Where several programs share a
tile, each writes its partial sums as float32, and the last one adds all of them up, in the order of columns.

Serves rows in 16 bits on compute capability 9.0.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.blocks.block_weight import BlockArguments
from accel_kernels.gemm.blocks.fragments.block_rows_triton import (
    banks,
    half_words,
    has_minimum,
    joined_words,
    of_unit,
    part_scales,
    rows_layout,
    span_scales,
)
from accel_kernels.gemm.blocks.fragments.unit_numbers_triton import pair_table
from accel_kernels.gemm.blocks.fragments.units_triton import (
    SET,
    UNIT,
    high_bits,
    unit_factors,
    unit_parts,
)
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.gemm.gluon_triton import all_threads, column_blocks, start_load
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.tile_store_triton import flat, flat_layout, unflat
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.norm.norm import Norm, kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

BLOCK_N = 128  # rows of the weight to a tile, its gate's included: 16 of each of 8 warps
COUNTERS = tl.constexpr(256)  # split counters that are set to zero at a time
WIDEST = 16384  # columns that a program normalizes


class BlockWgmmaTile(NamedTuple):
    """Rows of x to a program, a power of two; units loaded ahead; stages of the ring of x; programs to a processor."""

    x_rows: int
    depth: int
    x_stages: int
    programs: int


@triton.jit
def _first(unit, part, SOURCE: tl.constexpr, SIZE: tl.constexpr):
    """As `part_column`."""
    if SOURCE == "sixes":
        return unit // 2 * 128 + unit % 2 * 32 + part // 2 * 64 + part % 2 * 16
    else:
        return unit * 64 + part * SIZE


@triton.jit
def _column(place, SOURCE: tl.constexpr):
    """The column whose number stands at this place in the order of the factor, see `unit_factors`."""
    SIZE: tl.constexpr = 64 // unit_parts(SOURCE)
    unit, part, rest = place // 64 % 4, place % 64 // SIZE, place % SIZE
    pair, thread, half, more = rest & 1, rest >> 1 & 3, rest >> 3 & 1, rest >> 4
    if SOURCE == "table":
        number = (more >> 1) * 8 + (more & 1) * 4 + half * 2 + pair
    elif SOURCE == "sixes":
        number = half * 2 + pair
    else:
        number = more * 4 + pair * 2 + half
    if SOURCE == "halves":
        number = thread * 4 + more * 16 + pair * 2 + half
    else:
        number += thread * (SIZE // 4)
    return place // 256 * 256 + _first(unit, part, SOURCE, SIZE) + number


@triton.jit(do_not_specialize=("counters", "padded"))
def place_rows_kernel(
    x_ptr, norm, y_ptr, x_sums_ptr, counters_ptr, counters, padded, K: tl.constexpr, SOURCE: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x after its norm in the order of the factor's columns, and zeros for programs that share tiles to count with.

    Where wanted sums of each part, too, `padded` rows apart.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column, mask = _column(place, SOURCE), place < K
    row = tl.program_id(0).to(tl.int64) * K
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0)
    if NORM != "none":
        x = x.to(tl.float32)
        if NORM == "layer":
            x = tl.where(mask, x - tl.sum(x, axis=0) / K, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / K + norm.eps)
        if norm.weight is not None:
            x *= tl.load(norm.weight + column, mask=mask, other=0.0).to(tl.float32) + norm.offset
        if norm.bias is not None:
            x += tl.load(norm.bias + column, mask=mask, other=0.0).to(tl.float32)
    x = x.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row + place, x, mask=mask)
    if x_sums_ptr is not None:
        SIZE: tl.constexpr = 64 // unit_parts(SOURCE)
        sums = tl.sum(x.to(tl.float32).reshape(BLOCK // SIZE, SIZE), axis=1)
        part = tl.program_id(1) * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)
        tl.store(x_sums_ptr + part * padded + tl.program_id(0), sums, mask=part < K // SIZE)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for start in range(0, counters, COUNTERS):
            at = start + tl.arange(0, COUNTERS)
            tl.store(counters_ptr + at, tl.zeros((COUNTERS,), tl.int32), mask=at < counters)


@gluon.jit
def _wide(values, SCALE_AT: gl.constexpr):
    """Scales of a unit, (1, N, 4), for each of a thread's two words."""
    one = of_unit(values, SCALE_AT)
    return gl.join(one, one).reshape([1, values.shape[1], 8])


@gluon.jit
def _of_rows(values, SCALE_AT: gl.constexpr, M: gl.constexpr, MMA: gl.constexpr):
    """Scales of a unit, (1, N, 4), for each row of x, (N, M)."""
    N: gl.constexpr = values.shape[1]
    one = of_unit(values, SCALE_AT)
    wide = gl.join(one, one)
    if M >= 16:
        wide = gl.join(wide, wide)
    if M >= 32:
        wide = gl.join(wide, wide)
    wide = wide.reshape([N, 4, 2, M // 8]).permute((0, 3, 1, 2))
    return gl.convert_layout(wide.reshape([N, M]), MMA)


@gluon.jit
def _x_sums(ptr, unit, first, rows, K: gl.constexpr, SOURCE: gl.constexpr, M: gl.constexpr, MMA: gl.constexpr):
    """Sums of x of a unit's parts, (1, M) each, where they are needed."""
    found = ()
    if has_minimum(SOURCE):
        row = first + gl.arange(0, M, layout=gl.SliceLayout(0, MMA))
        for part in gl.static_range(unit_parts(SOURCE)):
            place = (unit * unit_parts(SOURCE) + part) * rows + row
            found = found + (gl.expand_dims(gl.load(ptr + place, mask=unit < K // UNIT, other=0.0), 0),)
    return found


@gluon.jit
def _whole(parts):
    """Numbers of the parts, (1, N, columns) each, as (N, 64)."""
    N: gl.constexpr = parts[0].shape[1]
    if len(parts) == 1:
        return parts[0].reshape([N, 64])
    elif len(parts) == 2:
        return gl.join(parts[0], parts[1]).permute((0, 1, 3, 2)).reshape([N, 64])
    else:
        four = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))  # the last axis counts fastest
        return four.reshape([1, N, 16, 4]).permute((0, 1, 3, 2)).reshape([N, 64])


@gluon.jit
def _load_x(desc, ready, ring, at, begin, end, row, SETS: gl.constexpr, STAGES: gl.constexpr):
    """Starts the load of unit `at` of the program's steps."""
    step, slot = begin + at // 8, at % STAGES
    start_load(desc, [row, step % SETS * 512 + at % 8 * 64], ready.index(slot), ring.index(slot), pred=step < end)


@gluon.jit(do_not_specialize=("m", "total", "share", "blocks_m"))
def block_wgmma_kernel(
    x_desc, weight, up, after, y_ptr, partial_sums_ptr, split_counters_ptr, x_sums_ptr, m, n, total, share, blocks_m,
    K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr, DTYPE: gl.constexpr, GATE: gl.constexpr,
    WHOLE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, DEPTH: gl.constexpr,
    X_STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """share: steps of a program; total: of all that multiply the same rows of x. blocks_m: of BLOCK_M rows."""
    ROWS: gl.constexpr = 16 * num_warps
    TILE: gl.constexpr = ROWS // 2 if GATE else ROWS
    SETS: gl.constexpr = (K + SET - 1) // SET
    PARTS: gl.constexpr = unit_parts(SOURCE)
    POST_SCALE: gl.constexpr = BLOCK_M <= 32  # else products are more than numbers
    ZERO: gl.constexpr = zero_point("int4", DTYPE) - 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    HALF: gl.constexpr = rows_layout(2, ROWS // 2, num_warps)
    SCALES: gl.constexpr = rows_layout(1, ROWS, num_warps)
    FLAT: gl.constexpr = flat_layout(num_warps, ROWS * BLOCK_M)
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, num_warps], [0, 1])
    PIECES: gl.constexpr = (BLOCK_M + 63) // 64  # of a tile, written in turn: each goes through shared memory
    xs = gl.allocate_shared_memory(DTYPE, [X_STAGES, BLOCK_M, UNIT], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(X_STAGES):
        mbarrier.init(ready.index(early), count=1)
    fence_async_shared()
    all_threads()
    tiles = (n + TILE - 1) // TILE
    # Programs that multiply different rows of x with the same steps are neighbors: they read the weight together.
    rank, x_block = gl.program_id(0) // blocks_m, gl.program_id(0) % blocks_m
    x_first = x_block * BLOCK_M
    low = rank * share
    high_end = gl.minimum(low + share, total)
    ring = ()
    for ahead in gl.static_range(DEPTH):
        ring = ring + (
            half_words(weight, up, low // SETS, tiles, low % SETS, n, ahead, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, 1,
                       HALF),
        )  # fmt: skip
    held = span_scales(weight, up, low // SETS, tiles, low % SETS * 2, n, ROWS, K, FORMAT, SOURCE, GATE, WHOLE, 1,
                       SCALES)  # fmt: skip
    table = 0
    bank = 0
    if SOURCE == "table":
        table = pair_table(weight.side.code, DTYPE, num_warps)
        bank = banks(ROWS, 1, HALF)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(X_STAGES - 1):
        mbarrier.expect(ready.index(early), BLOCK_M * UNIT * 2, pred=low + early // 8 < high_end)
        _load_x(x_desc, ready, xs, early, low, high_end, x_first, SETS, X_STAGES)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
    for tile in range(low // SETS, gl.cdiv(high_end, SETS)):
        begin, end = gl.maximum(low, tile * SETS), gl.minimum(high_end, (tile + 1) * SETS)
        acc = nothing
        for step in range(begin, end):
            later = step + 1
            high = 0
            for unit in gl.static_range(8):
                if unit % 4 == 0:
                    scales = part_scales(held, weight, up, ROWS, SOURCE, ZERO, GATE, 1, SCALES)
                    if unit == 0:
                        held = span_scales(weight, up, tile, tiles, (step - tile * SETS) * 2 + 1, n, ROWS, K, FORMAT,
                                           SOURCE, GATE, WHOLE, 1, SCALES)  # fmt: skip
                    else:
                        held = span_scales(weight, up, later // SETS, tiles, later % SETS * 2, n, ROWS, K, FORMAT,
                                           SOURCE, GATE, WHOLE, 1, SCALES)  # fmt: skip
                words = joined_words(ring[0])
                high = high_bits(words, high, unit, SOURCE)
                at = (step - low) * 8 + unit
                x_now = xs.index(at % X_STAGES)
                if POST_SCALE:
                    sums = _x_sums(
                        x_sums_ptr, step % SETS * 8 + unit, x_first, blocks_m * BLOCK_M, K, SOURCE, BLOCK_M, MMA
                    )
                    left = unit_factors(words, high, table, bank, 0, unit, DTYPE, FORMAT, SOURCE, False)
                    mbarrier.wait(ready.index(at % X_STAGES), at // X_STAGES & 1)
                    found = ()
                    for part in gl.static_range(PARTS):
                        factor = gl.convert_layout(left[part].reshape([ROWS, UNIT // PARTS]), LEFT)
                        own = x_now.slice(part * (UNIT // PARTS), UNIT // PARTS, dim=1).permute((1, 0))
                        found = found + (warpgroup_mma(factor, own, nothing, use_acc=False, is_async=True),)
                    for part in gl.static_range(PARTS):
                        products = warpgroup_mma_wait(PARTS - 1 - part, deps=(found[part],))
                        acc += products * _of_rows(scales[part], unit % 4, BLOCK_M, MMA)
                        if has_minimum(SOURCE):
                            acc += sums[part] * _of_rows(scales[PARTS + part], unit % 4, BLOCK_M, MMA)
                else:
                    own = ()
                    for part in gl.static_range(len(scales)):
                        own = own + (_wide(scales[part], unit % 4),)
                    left = unit_factors(words, high, table, bank, own, unit, DTYPE, FORMAT, SOURCE, True)
                    mbarrier.wait(ready.index(at % X_STAGES), at // X_STAGES & 1)
                    factor = gl.convert_layout(_whole(left), LEFT)
                    acc = warpgroup_mma(factor, x_now.permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                all_threads()  # all warps are done with the unit before this one
                next_at = at + X_STAGES - 1
                mbarrier.expect(ready.index(next_at % X_STAGES), BLOCK_M * UNIT * 2, pred=low + next_at // 8 < high_end)
                _load_x(x_desc, ready, xs, next_at, low, high_end, x_first, SETS, X_STAGES)
                next_step = step if unit + DEPTH < 8 else later
                ring = ring[1:] + (
                    half_words(weight, up, next_step // SETS, tiles, next_step % SETS, n, (unit + DEPTH) % 8, ROWS, K,
                               FORMAT, SOURCE, GATE, WHOLE, 1, HALF),
                )  # fmt: skip
        if not POST_SCALE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        done = end - begin == SETS
        if end - begin < SETS:
            first, last = tile * SETS // share, ((tile + 1) * SETS - 1) // share
            # A program writes at most two such sums: of a tile that another program begins, and of one that it begins.
            to = gl.program_id(0) * 2 + (rank == first).to(gl.int32)
            mine = flat(acc, num_warps, FLAT)
            place = gl.arange(0, ROWS * BLOCK_M, layout=FLAT)
            gl.store(partial_sums_ptr + to.to(gl.int64) * (ROWS * BLOCK_M) + place, mine)
            all_threads()
            done = gl.atomic_add(split_counters_ptr + (tile * blocks_m + x_block), 1, sem="acq_rel") == last - first
            if done:
                mine = gl.zeros([ROWS * BLOCK_M], gl.float32, FLAT)
                for sharer in range(first, last + 1):
                    one = (sharer * blocks_m + x_block) * 2 + (sharer == first).to(gl.int32)
                    its = partial_sums_ptr + one.to(gl.int64) * (ROWS * BLOCK_M) + place
                    mine += gl.load(its, cache_modifier=".cg")
                acc = unflat(mine, ROWS, BLOCK_M, num_warps, MMA)
        if done:
            if GATE:
                y, other = gl.split(acc.reshape([TILE // 8, 2, 8, BLOCK_M]).permute((0, 2, 3, 1)))
                y = column_blocks(y.reshape([TILE, BLOCK_M]), PIECES)
                other = column_blocks(other.reshape([TILE, BLOCK_M]), PIECES)
            else:
                y = column_blocks(acc, PIECES)
                other = y
            for piece in gl.static_range(PIECES):
                row = x_first + piece * (BLOCK_M // PIECES)
                a, b = gl.convert_layout(y[piece], OUT), gl.convert_layout(other[piece], OUT)
                write(a, b, tile * TILE, row, weight, up, after, y_ptr, m, n, True, GATE, ACTIVATION, OUT)


def block_wgmma_tile(rows: int, n: int, k: int, gate: bool, processors: int) -> BlockWgmmaTile:
    """Counted, not measured."""
    return BlockWgmmaTile(min(128, max(16, power_of_two(rows))), 4, 4, 1)


def place_rows(
    x: torch.Tensor, norm: Norm | None, source: str, counters: int, padded: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x (..., K) after its norm in the order in which `source` gives columns, (rows, K); int32 zeros (counters,).

    With `padded` sums of all parts of x, float32 (parts of K, padded), else None.
    """
    k = x.shape[-1]
    if norm is not None and k > WIDEST:
        x, norm = apply_norm(x, norm), None
    placed = torch.empty((x.numel() // k, k), device=x.device, dtype=x.dtype)
    zeros = torch.empty((counters,), device=x.device, dtype=torch.int32)
    sums = torch.empty((k // 32, padded), device=x.device, dtype=torch.float32) if padded else None
    before, kind = kernel_arguments(norm)
    block = 1024 if norm is None else power_of_two(k)
    launch(
        place_rows_kernel, (len(placed), triton.cdiv(k, block)), x, before, placed, sums, zeros, counters, padded, K=k,
        SOURCE=source, NORM=kind, BLOCK=block, num_warps=min(16, max(4, block // 512)), **programmatic(x.device),
    )  # fmt: skip
    return placed, zeros, sums


def block_wgmma(x, weight, norm, epilogue, tile, y):
    """Writes what `block_linear` returns into y."""
    n, k = weight.shape
    rows, up, source = x.numel() // k, epilogue.up, weight.format.source
    gate, sets = up is not None, triton.cdiv(k, SET.value)
    blocks_m = triton.cdiv(rows, tile.x_rows)
    total = triton.cdiv(n, BLOCK_N // (1 + gate)) * sets
    share = triton.cdiv(total, max(1, tile.programs * multiprocessors(x.device) // blocks_m))
    programs = triton.cdiv(total, share) * blocks_m
    parts = torch.empty(programs * 2 * BLOCK_N * tile.x_rows, device=x.device, dtype=torch.float32)
    padded = blocks_m * tile.x_rows if tile.x_rows <= 32 and has_minimum(source) else 0
    placed, counters, sums = place_rows(x, norm, source, total // sets * blocks_m, padded)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    registers = {"maxnreg": 65536 // (256 * tile.programs)} if tile.programs > 1 else {}
    launch(
        block_wgmma_kernel, (programs,),
        TensorDescriptor.from_tensor(placed, [tile.x_rows, UNIT.value], layout), BlockArguments.of(weight),
        BlockArguments.of(up if gate else weight), epilogue.arguments, y, parts, counters, sums, rows, n, total, share,
        blocks_m, K=k, FORMAT=weight.format.name, SOURCE=source,
        DTYPE=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16, **epilogue.flags,
        WHOLE=n % (BLOCK_N // (1 + gate)) == 0, BLOCK_M=tile.x_rows,
        DEPTH=tile.depth, X_STAGES=tile.x_stages, num_warps=8, **registers,
        **programmatic(x.device),
    )  # fmt: skip
