"""The largest number of each row: programs find that of a piece each, then one a row the largest of these."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.float_order_triton import NEVER, in_order
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

PIECE = 2048  # numbers to a program


@triton.jit
def piece_kernel(x_ptr, best_ptr, stride, n, PIECE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    x = tl.load(x_ptr + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    best = tl.max(tl.where(at < n, in_order(x, at), NEVER), axis=0)
    tl.store(best_ptr + row * tl.num_programs(0) + tl.program_id(0), best)


@triton.jit(do_not_specialize=("pieces",))
def place_kernel(best_ptr, y_ptr, pieces, PIECES: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, PIECES)
    best = tl.max(tl.load(best_ptr + row * pieces + at, mask=at < pieces, other=NEVER), axis=0)
    tl.store(y_ptr + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))


def argmax(x):
    """Same argument and result as the reference."""
    (rows, n), pdl = x.shape, programmatic(x.device)
    pieces = cdiv(n, PIECE)
    best = torch.empty(rows * pieces, device=x.device, dtype=torch.int64)
    y = torch.empty(rows, device=x.device, dtype=torch.int64)
    launch(piece_kernel, (pieces, rows), x, best, x.stride(0), n, PIECE, num_warps=8, **pdl)
    launch(place_kernel, (rows,), best, y, pieces, power_of_two(pieces), num_warps=1, **pdl)
    return y
