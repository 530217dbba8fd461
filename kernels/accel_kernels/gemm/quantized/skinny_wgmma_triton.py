"""A weight of fewer bits times up to 512 rows, for Hopper: both read through shared memory, numbers multiplied out of
registers by a whole warpgroup.

All of x is read again for every tile of the weight: with tiles of 128 rows, 64 rows of x are a byte to each byte of a
weight in 8 bits. More than 64 rows of x come in blocks of 128, each for programs of its own, which walk over the same
steps side by side: memory gives a weight to the first of them, the L2 cache to the others. Words of the weight come in
boxes of 128 bytes of a row through a ring, x through a shorter one, in the order of columns of `permute_activations`.
While a piece is multiplied, the next is unpacked. Where one scale covers a piece of a row, it multiplies the products
rather than the numbers, and the zero point is taken off the products, by sums of x.

A step is a box of every row of a tile. Programs share the steps of all tiles evenly. Where several programs share a
tile, each writes its partial sums as float32, and the last one adds all of them up, in the order of columns. A tile is
two blocks of rows: neighbors, or the same of a weight and of its gate's; their rows alternate by eight in the
instruction, so that a thread has what belongs together.

Serves 2 to 512 rows in 16 bits on compute capability 9.0; docs/measurements/quantization.md has its times.
"""

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

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.gemm.gluon_triton import all_threads, column_blocks, start_load, tensor_map
from accel_kernels.gemm.quantized.operands.permuted_activations_triton import box_columns, permute_activations
from accel_kernels.gemm.quantized.operands.unpacking_triton import zero_point
from accel_kernels.gemm.quantized.operands.wgmma_operands_triton import (
    blocks,
    both,
    factor,
    half_layout,
    row_scales,
    scales_and_zeros,
)
from accel_kernels.gemm.quantized.tile_store_triton import flat, flat_layout, unflat
from accel_kernels.gemm.quantized.tile_triton import at_once, post_scale, steps_of_a_program
from accel_kernels.gemm.quantized.write_triton import write
from accel_kernels.gemm.quantized_weight import MOST_QUANTIZED_ROWS, PackedWeight
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

WORDS = 32  # of a row in a box


@gluon.jit
def _load_words(desc, ready, ring, at, low, high, BOXES: gl.constexpr, TILE: gl.constexpr, FIRST: gl.constexpr,
                STAGES: gl.constexpr):  # fmt: skip
    """Starts the load of a block of the program's step `at`, of none beyond its last. TILE: rows from tile to tile."""
    step, slot = low + at, at % STAGES
    place = [step // BOXES * TILE + FIRST, step % BOXES * 32]
    start_load(desc, place, ready.index(slot), ring.index(slot), pred=step < high)


@gluon.jit
def _load_x(desc, ready, ring, at, low, high, row, BOXES: gl.constexpr, BOX: gl.constexpr, FIRST: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    step, slot = low + at, at % STAGES
    start_load(desc, [row, step % BOXES * BOX + FIRST], ready.index(slot), ring.index(slot), pred=step < high)


@gluon.jit
def _scaled(acc, part, scaling, sums, ZERO_POINT: gl.constexpr, BY_SUMS: gl.constexpr, ZEROS: gl.constexpr):
    """acc + a piece's products times the scales of its rows. BY_SUMS: the zero point is taken off by sums of x."""
    if BY_SUMS:
        over = gl.expand_dims(sums, 0)
        if ZEROS:
            over *= gl.expand_dims(scaling[1].to(gl.float32), 1) + ZERO_POINT
        else:
            over *= ZERO_POINT
        part -= over
    return acc + part * gl.expand_dims(scaling[0].to(gl.float32), 1)


@gluon.jit(do_not_specialize=("m", "total", "share", "blocks_m"))
def skinny_wgmma_kernel(
    x_desc, w_desc, u_desc, weight, up, after, y_ptr, partial_sums_ptr, split_counters_ptr, x_sums_ptr, m, n, total,
    share, blocks_m, K: gl.constexpr, GROUPS: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr,
    GATE: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, AT_ONCE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """share: steps of a program; total: of all that multiply the same rows of x. blocks_m: of BLOCK_M rows. AT_ONCE:
    partial sums of a tile that are loaded at a time.

    A piece is half a box: 16 bytes of a thread in each of its rows.
    """
    H: gl.constexpr = BLOCK_N // 2
    TILE: gl.constexpr = H if GATE else BLOCK_N
    PIECE: gl.constexpr = 128 if FORMAT == "int4" else 64
    BOXES: gl.constexpr = (K + 2 * PIECE - 1) // (2 * PIECE)
    X_BYTES: gl.constexpr = 2 * BLOCK_M * PIECE * 2
    ZEROS: gl.constexpr = weight.zeros is not None
    SCALED: gl.constexpr = GROUPS > 1 or FORMAT == "int4" or ZEROS
    POST_SCALE: gl.constexpr = post_scale(K, GROUPS, FORMAT, ZEROS, BLOCK_M)
    BY_SUMS: gl.constexpr = POST_SCALE and (FORMAT == "int4" or ZEROS)
    ZERO_POINT: gl.constexpr = zero_point(FORMAT, DTYPE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    READ: gl.constexpr = half_layout(num_warps, H, 8)
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    OF_X: gl.constexpr = gl.SliceLayout(0, MMA)
    FLAT: gl.constexpr = flat_layout(num_warps, BLOCK_N * BLOCK_M)
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, num_warps], [0, 1])
    PARTS: gl.constexpr = (BLOCK_M + 63) // 64  # of a tile, written in turn: each goes through shared memory on its way
    # A ring to each operand: of two loads into one the compiler makes the second wait for all warps.
    ws = gl.allocate_shared_memory(gl.int32, [STAGES, H, 32], w_desc.layout)
    us = gl.allocate_shared_memory(gl.int32, [STAGES, H, 32], u_desc.layout)
    xs = gl.allocate_shared_memory(DTYPE, [X_STAGES, BLOCK_M, PIECE], x_desc.layout)
    zs = gl.allocate_shared_memory(DTYPE, [X_STAGES, BLOCK_M, PIECE], x_desc.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(w_ready.index(early), count=1)
    for early in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(early), count=1)
    fence_async_shared()
    all_threads()
    # Programs that multiply different rows of x with the same steps are neighbors: they read the weight together.
    rank, x_block = gl.program_id(0) // blocks_m, gl.program_id(0) % blocks_m
    x_first = x_block * BLOCK_M
    low = rank * share
    high = gl.minimum(low + share, total)
    for early in gl.static_range(STAGES - 1):
        mbarrier.expect(w_ready.index(early), 2 * H * 128, pred=low + early < high)
    for early in gl.static_range(X_STAGES - 1):
        mbarrier.expect(x_ready.index(early), X_BYTES, pred=low + early < high)
    for early in gl.static_range(STAGES - 1):
        _load_words(w_desc, w_ready, ws, early, low, high, BOXES, TILE, 0, STAGES)
    for early in gl.static_range(STAGES - 1):
        _load_words(u_desc, w_ready, us, early, low, high, BOXES, TILE, 0 if GATE else H, STAGES)
    ahead = ()
    for early in gl.static_range(2):
        if POST_SCALE:
            ahead = ahead + (row_scales(weight, up, low + early, high, n, K, GROUPS, BOXES, PIECE, H, GATE, ROWS),)
        elif SCALED:
            ahead = ahead + (
                scales_and_zeros(weight, up, low + early, high, n, K, GROUPS, BOXES, PIECE, H, GATE, num_warps),
            )
    x_row = x_first + gl.arange(0, BLOCK_M, layout=OF_X)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for early in gl.static_range(X_STAGES - 1):
        _load_x(x_desc, x_ready, xs, early, low, high, x_first, BOXES, 2 * PIECE, 0, X_STAGES)
        _load_x(x_desc, x_ready, zs, early, low, high, x_first, BOXES, 2 * PIECE, PIECE, X_STAGES)
    for tile in range(low // BOXES, gl.cdiv(high, BOXES)):
        begin, end = gl.maximum(low, tile * BOXES), gl.minimum(high, (tile + 1) * BOXES)
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
        for step in range(begin, end):
            at = step - low
            mbarrier.wait(w_ready.index(at % STAGES), at // STAGES & 1)
            words = both(ws.index(at % STAGES).load(READ), us.index(at % STAGES).load(READ))
            pieces = gl.split(words.reshape([BLOCK_N, 2, 16]).permute((0, 2, 1)))
            sums = (0.0, 0.0)
            if BY_SUMS:
                every = blocks_m * BLOCK_M
                place, inside = x_sums_ptr + step % BOXES * (2 * every) + x_row, x_row < m
                sums = (gl.load(place, mask=inside, other=0.0), gl.load(place + every, mask=inside, other=0.0))
            scaling = ((), ())
            if SCALED:
                scaling = ahead[0]
            x_slot = at % X_STAGES
            left = factor(pieces[0], scaling[0], FORMAT, DTYPE, SCALED and not POST_SCALE, ZEROS and not POST_SCALE,
                          POST_SCALE, ZERO_POINT, LEFT, num_warps)  # fmt: skip
            mbarrier.wait(x_ready.index(x_slot), at // X_STAGES & 1)
            first = warpgroup_mma(left, xs.index(x_slot).permute((1, 0)), acc, use_acc=not POST_SCALE, is_async=True)
            if not POST_SCALE:
                acc = warpgroup_mma_wait(1, deps=(first,))
            all_threads()  # all warps are done with the step before this one
            w_at, x_at = at + STAGES - 1, at + X_STAGES - 1
            mbarrier.expect(w_ready.index(w_at % STAGES), 2 * H * 128, pred=low + w_at < high)
            mbarrier.expect(x_ready.index(x_at % X_STAGES), X_BYTES, pred=low + x_at < high)
            # In this order: before two loads that one barrier counts the compiler makes all warps meet.
            _load_words(w_desc, w_ready, ws, w_at, low, high, BOXES, TILE, 0, STAGES)
            _load_x(x_desc, x_ready, xs, x_at, low, high, x_first, BOXES, 2 * PIECE, 0, X_STAGES)
            _load_words(u_desc, w_ready, us, w_at, low, high, BOXES, TILE, 0 if GATE else H, STAGES)
            _load_x(x_desc, x_ready, zs, x_at, low, high, x_first, BOXES, 2 * PIECE, PIECE, X_STAGES)
            # Scales of the step after the next: behind the fence that the compiler sets before those loads.
            if POST_SCALE:
                more = row_scales(weight, up, step + 2, high, n, K, GROUPS, BOXES, PIECE, H, GATE, ROWS)
                ahead = (ahead[1], more)
            elif SCALED:
                more = scales_and_zeros(weight, up, step + 2, high, n, K, GROUPS, BOXES, PIECE, H, GATE, num_warps)
                ahead = (ahead[1], more)
            left = factor(pieces[1], scaling[1], FORMAT, DTYPE, SCALED and not POST_SCALE, ZEROS and not POST_SCALE,
                          POST_SCALE, ZERO_POINT, LEFT, num_warps)  # fmt: skip
            second = warpgroup_mma(left, zs.index(x_slot).permute((1, 0)), acc, use_acc=not POST_SCALE, is_async=True)
            if POST_SCALE:
                part = warpgroup_mma_wait(1, deps=(first,))
                acc = _scaled(acc, part, scaling[0], sums[0], ZERO_POINT, BY_SUMS, ZEROS)
                part = warpgroup_mma_wait(0, deps=(second,))
                acc = _scaled(acc, part, scaling[1], sums[1], ZERO_POINT, BY_SUMS, ZEROS)
            else:
                acc = warpgroup_mma_wait(1, deps=(second,))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        done = end - begin == BOXES
        if end - begin < BOXES:
            first, last = tile * BOXES // share, ((tile + 1) * BOXES - 1) // share
            # A program writes at most two such sums: of a tile that another program begins, and of one that it begins.
            own = gl.program_id(0) * 2 + (rank == first).to(gl.int32)
            mine = flat(acc, num_warps, FLAT)
            place = gl.arange(0, BLOCK_N * BLOCK_M, layout=FLAT)
            gl.store(partial_sums_ptr + own.to(gl.int64) * (BLOCK_N * BLOCK_M) + place, mine)
            all_threads()
            done = gl.atomic_add(split_counters_ptr + (tile * blocks_m + x_block), 1, sem="acq_rel") == last - first
            if done:
                mine = gl.zeros([BLOCK_N * BLOCK_M], gl.float32, FLAT)
                for sharer in range(first, last + 1, AT_ONCE):
                    parts = ()
                    for more in gl.static_range(AT_ONCE):
                        part = ((sharer + more) * blocks_m + x_block) * 2 + (sharer + more == first).to(gl.int32)
                        its = partial_sums_ptr + part.to(gl.int64) * (BLOCK_N * BLOCK_M) + place
                        parts = parts + (gl.load(its, mask=sharer + more <= last, other=0.0, cache_modifier=".cg"),)
                    for more in gl.static_range(AT_ONCE):
                        mine += parts[more]
                acc = unflat(mine, BLOCK_N, BLOCK_M, num_warps, MMA)
        if done:
            lower, upper = blocks(acc)
            lower, upper = column_blocks(lower, PARTS), column_blocks(upper, PARTS)
            to = tile * TILE
            for piece in gl.static_range(PARTS):
                row = x_first + piece * (BLOCK_M // PARTS)
                y, other = gl.convert_layout(lower[piece], OUT), gl.convert_layout(upper[piece], OUT)
                write(y, other, to, row, weight, up, after, y_ptr, m, n, SCALED, GATE, ACTIVATION, OUT)
                if not GATE:
                    write(other, y, to + H, row, weight, up, after, y_ptr, m, n, SCALED, GATE, ACTIVATION, OUT)


def refusal(x, weight, up) -> str | None:
    """Why `skinny_wgmma` cannot take what `quantized_linear` supports; the device is the caller's to check."""
    n, k = weight.shape
    scaled = weight.scales.shape[1] > 1 or weight.format.name == "int4" or weight.zeros is not None
    if x.numel() // k > MOST_QUANTIZED_ROWS:
        return f"{x.numel() // k} rows, more than {MOST_QUANTIZED_ROWS}"
    if weight.data.shape[1] * weight.data.element_size() % 16:
        return f"rows of {k} columns, not a multiple of 16 bytes"
    if scaled and any(one is not None and one.scales.dtype != x.dtype for one in (weight, up)):
        return f"scales of {weight.scales.dtype} before a product of {x.dtype}"
    if any(one is not None and one.data.data_ptr() % 16 for one in (weight, up)):
        return "a weight not at a multiple of 16 bytes"
    return None


def skinny_wgmma(x, weight, norm, epilogue, tile, y):
    """Same arguments and result as `skinny_mma`, on compute capability 9.0 alone, up to MOST_QUANTIZED_ROWS rows.

    tile: a WgmmaTile. Raises ValueError for a tile that is not of whole warpgroups, or with `refusal`.
    """
    up = epilogue.up
    reason = refusal(x, weight, up)
    if reason is not None:
        raise ValueError(reason)
    if tile.x_rows > 256 or tile.x_rows & tile.x_rows - 1 or (not tile.x_rows and x.numel() // weight.shape[1] > 256):
        raise ValueError(f"{tile.x_rows} rows of x at a time: a power of two, at most 256")
    if tile.warps % 4 or tile.rows % (16 * tile.warps):
        raise ValueError(f"{tile.rows} rows to {tile.warps} warps: warps come by 4, rows by 16 to a warp")
    n, k = weight.shape
    rows, gate, format = x.numel() // k, up is not None, weight.format.name
    box, half = box_columns(format), tile.rows // 2
    boxes = triton.cdiv(k, box)
    tiles = triton.cdiv(n, half if gate else tile.rows)
    block_m = tile.x_rows or max(8, power_of_two(rows))
    blocks_m = triton.cdiv(rows, block_m)
    abreast = max(1, multiprocessors(x.device) // blocks_m)
    share = steps_of_a_program(tile, block_m, format, tiles, boxes, abreast)
    programs = triton.cdiv(tiles * boxes, share) * blocks_m
    registers = {"maxnreg": 65536 // (32 * tile.warps * tile.programs)} if 32 * tile.warps * tile.programs > 256 else {}
    parts = torch.empty(programs * 2 * tile.rows * block_m, device=x.device, dtype=torch.float32)
    zeros, groups = weight.zeros is not None, weight.scales.shape[1]
    by_sums = post_scale(k, groups, format, zeros, block_m) and (format == "int4" or zeros)
    sum_rows = blocks_m * block_m if by_sums else None
    placed, split_counters, sums = permute_activations(
        x, norm, format, boxes * box, tiles * blocks_m, sum_rows, weight.order
    )
    other = up if gate else weight
    words = (tensor_map(one.data.detach().view(torch.int32), half, WORDS) for one in (weight, other))
    launch(
        skinny_wgmma_kernel, (programs,),
        tensor_map(placed, block_m, box // 2), *words,
        PackedWeight(None, weight.scales, weight.zeros), PackedWeight(None, other.scales, other.zeros),
        epilogue.arguments, y, parts, split_counters, sums, rows, n, tiles * boxes, share, blocks_m,
        K=k, GROUPS=groups, FORMAT=format, DTYPE=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
        **epilogue.flags, BLOCK_M=block_m, BLOCK_N=tile.rows, STAGES=tile.stages, X_STAGES=tile.x_stages,
        AT_ONCE=at_once(tile, block_m), num_warps=tile.warps, **programmatic(x.device), **registers,
    )  # fmt: skip
