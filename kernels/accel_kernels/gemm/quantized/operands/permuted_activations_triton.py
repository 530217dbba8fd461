"""Rows of x in the order in which `skinny_wgmma` unpacks columns of the weight, their norm on the way.

A thread of that kernel reads 16 bytes of a row of the weight at a time, four threads 64: a piece, half a box. What they
stand for are its columns of several instructions, which take two neighbors from each of four threads, and two more.
The order repeats with every piece.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.gemm.fused_linear import apply_norm
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

BLOCK = 1024  # columns of a program without a norm
WIDEST = 16384  # columns that a program holds in registers
COUNTERS = tl.constexpr(256)  # split counters that are set to zero at a time


def box_columns(format: str) -> int:
    """How many columns of the weight one box of shared memory holds."""
    return 256 if format == "int4" else 128


@triton.jit
def column_of(place, INT4: tl.constexpr, NEIGHBORS: tl.constexpr):
    """Which column of x stands at this place. Bits of a place: number of the pair, thread, half of an instruction's
    columns, instruction of the word (4 bits alone), word; the number of a pair is the lowest."""
    pair, thread, half = place & 1, place >> 1 & 3, place >> 3 & 1
    if INT4:
        number = pair * 4 + (place >> 4 & 1) * 2 + half
        column = thread * 32 + (place >> 5 & 3) * 8 + number
        piece = place >> 7 << 7
    else:
        if NEIGHBORS:
            number = half * 2 + pair
        else:
            number = pair * 2 + half
        column = thread * 16 + (place >> 4 & 3) * 4 + number
        piece = place >> 6 << 6
    return piece + column


# Numbers that differ from product to product are no reason to compile once more.
@triton.jit(do_not_specialize=("counters", "block_m"))
def permute_activations_kernel(
    x_ptr, order_ptr, norm, y_ptr, x_sums_ptr, split_counters_ptr, counters, columns, padded, block_m,
    NORM: tl.constexpr, INT4: tl.constexpr, NEIGHBORS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = column_of(place, INT4, NEIGHBORS)
    mask = column < columns
    if order_ptr is not None:
        column = tl.load(order_ptr + column, mask=mask, other=0)
    if norm.weight is not None:
        weight = tl.load(norm.weight + column, mask=mask, other=0.0).to(tl.float32) + norm.offset
    if norm.bias is not None:
        bias = tl.load(norm.bias + column, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    if NORM != "none":
        x = x.to(tl.float32)
        if NORM == "layer":
            x = tl.where(mask, x - tl.sum(x, axis=0) / columns, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / columns + norm.eps)
        if norm.weight is not None:
            x *= weight
        if norm.bias is not None:
            x += bias
    x = x.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * padded + place, x, mask=place < padded)
    if x_sums_ptr is not None:  # of what is multiplied, piece by piece
        PIECE: tl.constexpr = 128 if INT4 else 64
        piece = tl.program_id(1) * (BLOCK_C // PIECE) + tl.arange(0, BLOCK_C // PIECE)
        sums = tl.sum(x.to(tl.float32).reshape(BLOCK_C // PIECE, PIECE), axis=1)
        tl.store(x_sums_ptr + piece * block_m + row, sums, mask=piece * PIECE < padded)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for start in range(0, counters, COUNTERS):
            at = start + tl.arange(0, COUNTERS)
            tl.store(split_counters_ptr + at, tl.zeros((COUNTERS,), tl.int32), mask=at < counters)


def permute_activations(x, norm, format: str, padded: int, split_counters: int, block_m: int | None = None, order=None):
    """x (..., K), contiguous, normed where norm is a Norm, as (rows, padded), in the order of the weight's factor.

    order: of the weight's own columns, see `Quantized`.

    Zeros stand beyond K. Returns besides: int32 zeros (split_counters,), which so need no launch of their own; with
    block_m the sums of every piece of every row, float32 (pieces, block_m), else None.
    """
    columns = x.shape[-1]
    rows = x.numel() // columns
    if norm is not None and padded > WIDEST:
        x, norm = apply_norm(x, norm), None
    y = torch.empty((rows, padded), device=x.device, dtype=x.dtype)
    counts = torch.empty((split_counters,), device=x.device, dtype=torch.int32)
    pieces = padded // (box_columns(format) // 2)
    sums = None if block_m is None else torch.empty((pieces, block_m), device=x.device, dtype=torch.float32)
    before, kind = kernel_arguments(norm)
    block = BLOCK if norm is None else power_of_two(padded)
    launch(
        permute_activations_kernel, (rows, triton.cdiv(padded, block)),
        x, order, before, y, sums, counts, split_counters, columns, padded, block_m or 0, NORM=kind,
        INT4=format == "int4", NEIGHBORS=format == "fp8" or x.dtype == torch.float16, BLOCK_C=block,
        num_warps=min(16, max(4, block // 512)), **programmatic(x.device),
    )  # fmt: skip
    return y, counts, sums
