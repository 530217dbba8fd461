"""A program reads a piece of all beams of a text before it writes any of them, so no second cache is needed."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

TILE = 2048  # words of 8 bytes to a program


@triton.jit(do_not_specialize=("width", "size"))
def reorder_kernel(
    kept_ptr, order_ptr, length_ptr, width, size, BEAMS: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """width, size: words of a token, and of a row."""
    text, part = tl.program_id(1), tl.program_id(2)
    b = tl.arange(0, B)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    used = tl.load(length_ptr) * width
    if tl.program_id(0) * COLUMNS < used:
        row = text * BEAMS + b
        source = tl.load(order_ptr + row, mask=b < BEAMS, other=0)
        moved = (b < BEAMS) & (source != row)
        if tl.max(moved.to(tl.int32), axis=0) != 0:
            mask = moved[:, None] & (at < used)[None, :]
            first = kept_ptr + part.to(tl.int64) * tl.num_programs(1) * BEAMS * size
            x = tl.load(first + source[:, None] * size + at[None, :], mask=mask)
            tl.debug_barrier()
            tl.store(first + row[:, None].to(tl.int64) * size + at[None, :], x, mask=mask)


def reorder_beams(kept, order, length, *, beams):
    """Same arguments and result as the reference."""
    words = kept.view(torch.int64)
    parts, rows, room, width = words.shape
    b = power_of_two(beams)
    columns = max(32, TILE // b)
    launch(
        reorder_kernel, (cdiv(room * width, columns), rows // beams, parts), words, order, length, width, room * width,
        BEAMS=beams, B=b, COLUMNS=columns, num_warps=4, **programmatic(kept.device),
    )  # fmt: skip
    return kept
