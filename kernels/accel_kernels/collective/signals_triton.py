"""Signals between GPUs, as cells that go from 0 to 1 and back when taken, found through a table of addresses."""

import triton
import triton.language as tl


@triton.jit
def meet(signals_ptr, cell, rank, RANKS: tl.constexpr):
    """Tells every other rank, and waits until it has told. cell: (RANKS,) signals of each rank are behind it."""
    tl.debug_barrier()  # every thread has written before the first of them tells so
    for peer in tl.static_range(RANKS):
        if peer != rank:
            cell_ptr = tl.load(signals_ptr + peer).to(tl.pointer_type(tl.int32)) + cell * RANKS + rank
            while tl.atomic_cas(cell_ptr, 0, 1, sem="release", scope="sys") != 0:
                pass
    for peer in tl.static_range(RANKS):
        if peer != rank:
            cell_ptr = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32)) + cell * RANKS + peer
            while tl.atomic_cas(cell_ptr, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
