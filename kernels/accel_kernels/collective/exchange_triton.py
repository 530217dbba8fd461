"""Every rank writes its pieces into the memory of the others, in one launch for several tensors.

Each program writes its share of all pieces, signals the same program of every other rank, and waits for their signals:
all that was sent to this rank is there when the kernel ends. WAITS: they also meet before, as what is overwritten may
still be read.
"""

import triton
import triton.language as tl

from accel_kernels.collective.exchange import DIMS
from accel_kernels.collective.signals_triton import meet
from accel_kernels.device import programmatic
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

BLOCK = 4096  # numbers to a step of a program, in rows of at most
COLUMNS = 1024
LEAST = 64  # columns that divide a row, so that none are left over
WARPS = 8


@triton.jit(do_not_specialize=("rank",))
def exchange_kernel(
    sources, strides, buffers_ptr, signals_ptr, place, each, rank, target_rank, target_0, target_1, rows, middle,
    inner, RANKS: tl.constexpr, TENSORS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WAITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of pieces (outer, middle, inner), whose inner dimension lies without gaps; rows: outer times middle. strides: of
    each source, from the piece for one rank to the next, and of the outer and the middle dimension.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    tiles, across = tl.cdiv(rows, ROWS), tl.cdiv(inner, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if WAITS:
        meet(signals_ptr, 2 * program, rank, RANKS)
    for number in tl.static_range(TENSORS):
        source_rank, source_0, source_1 = strides[number]
        for tile in range(program, tiles * across, programs):
            row = tile // across * ROWS + tl.arange(0, ROWS)
            column = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
            mask = (row < rows)[:, None] & (column < inner)
            i_middle, i_outer = (row % middle).to(tl.int64)[:, None], (row // middle).to(tl.int64)[:, None]
            source = sources[number] + i_outer * source_0 + i_middle * source_1 + column
            target = i_outer * target_0 + i_middle * target_1 + column + place + number * each + rank * target_rank
            for step in tl.static_range(RANKS):  # so that what stays here is moved while the links are busy
                peer = (rank + 1 + step) % RANKS  # no two ranks send to one at a time
                room_ptr = tl.load(buffers_ptr + peer).to(tl.pointer_type(sources[number].dtype.element_ty))
                x = tl.load(source + peer.to(tl.int64) * source_rank, mask=mask)
                tl.store(tl.multiple_of(room_ptr, 16) + target, x, mask=mask)
    meet(signals_ptr, 2 * program + 1, rank, RANKS)


def exchange(tensors, buffers, signals, place, each, layouts, rank, programs, waits):
    """As `ExchangeRoom.exchange`. buffers, signals: (ranks,) int64, the addresses of each rank's room and cells. place,
    each: numbers before the first result, and from one to the next. programs: to share the work; the cells have two for
    each program and rank.
    """
    few = (1,) * (DIMS - len(layouts[0].sizes))
    (_, middle, inner), target = (*few, *layouts[0].sizes), (*few, *layouts[0].target)
    strides = tuple((one.source_rank, *(*few, *one.source)[:2]) for one in layouts)
    columns = min(COLUMNS, inner & -inner) if inner % LEAST == 0 else min(COLUMNS, power_of_two(inner))
    launch(
        exchange_kernel, (programs,), tuple(tensors), strides, buffers, signals, place, each, rank,
        layouts[0].target_rank, *target[:2], layouts[0].numel // inner, middle, inner, len(buffers), len(tensors),
        BLOCK // columns, columns, waits, num_warps=WARPS, **programmatic(buffers.device),
    )  # fmt: skip
