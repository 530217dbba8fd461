"""As the products of `grouped_triton.py`, for experts in fewer bits: numbers are written out in the dtype of x.

Whole numbers of up to 8 bits, with zero points too, and float8 are exact there. Those by row are scaled once, after the
sum; those by groups each, and rounded to the dtype of x, before they are multiplied. 4-bit numbers lie eight to an
int32: eight products, each with every eighth input.
"""

import triton
import triton.language as tl

from accel_kernels.moe.gating_triton import apply_gating
from accel_kernels.moe.grouped_triton import rows_of_tile


@triton.jit(do_not_specialize=("chosen",))
def quantized_grouped_up_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, order_ptr, starts_ptr, tiles_ptr, h_ptr, chosen, inner,
    K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    row_idx, row_mask = rows_of_tile(tile, expert, starts_ptr, ROWS)
    token = tl.load(order_ptr + row_idx, mask=row_mask, other=0) // chosen
    n_idx = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n_mask = n_idx < inner
    n_row = tl.minimum(n_idx, inner - 1)
    gate_row, up_row = n_row, inner + n_row
    if INTERLEAVED:
        gate_row, up_row = 2 * n_row, 2 * n_row + 1
    gate_row, up_row = expert.to(tl.int64) * 2 * inner + gate_row, expert.to(tl.int64) * 2 * inner + up_row
    x_row = x_ptr + token.to(tl.int64) * K
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, K, DEPTH):
        x = inputs_at(x_row, row_mask, step, K, DEPTH, UPCAST)
        gate = add_quantized(gate, x, w_ptr, scale_ptr, zero_ptr, gate_row, step, K, UNIT, SCALES, DEPTH)
        up = add_quantized(up, x, w_ptr, scale_ptr, zero_ptr, up_row, step, K, UNIT, SCALES, DEPTH)
    if SCALES == 1:
        gate *= tl.load(scale_ptr + gate_row).to(tl.float32)[None, :]
        up *= tl.load(scale_ptr + up_row).to(tl.float32)[None, :]
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + gate_row).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + up_row).to(tl.float32)[None, :]
    y = apply_gating(gate, up, KIND, ALPHA, LIMIT, SHIFT)
    place = h_ptr + row_idx.to(tl.int64)[:, None] * inner + n_idx[None, :]
    tl.store(place, y.to(h_ptr.dtype.element_ty), mask=row_mask[:, None] & n_mask[None, :])


@triton.jit
def quantized_grouped_down_kernel(
    h_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, order_ptr, starts_ptr, tiles_ptr, y_ptr, hidden,
    K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(tiles_ptr + tile, cache_modifier=".cg")
    if expert < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    row_idx, row_mask = rows_of_tile(tile, expert, starts_ptr, ROWS)
    n_idx = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    n_mask = n_idx < hidden
    w_row = expert.to(tl.int64) * hidden + tl.minimum(n_idx, hidden - 1)
    h_row = h_ptr + row_idx.to(tl.int64) * K
    pair = tl.load(order_ptr + row_idx, mask=row_mask, other=0, cache_modifier=".cg").to(tl.int64)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in range(0, K, DEPTH):
        h = inputs_at(h_row, row_mask, step, K, DEPTH, UPCAST)
        y = add_quantized(y, h, w_ptr, scale_ptr, zero_ptr, w_row, step, K, UNIT, SCALES, DEPTH)
    if SCALES == 1:
        y *= tl.load(scale_ptr + w_row).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + w_row).to(tl.float32)[None, :]
    mask = row_mask[:, None] & n_mask[None, :]
    tl.store(y_ptr + pair[:, None] * hidden + n_idx[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def inputs_at(rows, row_mask, step, K: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr):
    """(rows, DEPTH) of what begins at `rows`; zeros beyond the K inputs."""
    at = step + tl.arange(0, DEPTH)
    x = tl.load(rows[:, None] + at[None, :], mask=row_mask[:, None] & (at < K)[None, :], other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def add_quantized(
    acc, x, w_ptr, scale_ptr, zero_ptr, row, step, K: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """acc + x W^T of DEPTH inputs; x: (M, DEPTH); row: (N,), which of the weight."""
    UNITS: tl.constexpr = DEPTH // UNIT
    at = step // UNIT + tl.arange(0, UNITS)
    mask = (at < K // UNIT)[:, None]
    w = tl.load(w_ptr + row[None, :] * (K // UNIT) + at[:, None], mask=mask, other=0.0)
    group = row[None, :] * SCALES + (at * UNIT // (K // SCALES))[:, None]
    zero = 0.0
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + group, mask=mask, other=0).to(tl.float32)
    scale = 1.0
    if SCALES > 1:
        scale = tl.load(scale_ptr + group, mask=mask, other=0.0).to(tl.float32)
    if UNIT == 1:
        acc = tl.dot(x, ((w.to(tl.float32) - zero) * scale).to(x.dtype), acc, input_precision="ieee")
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], UNITS, 2, 2, 2)))
        acc = add_halves(acc, x0, w, zero, scale, 0)
        acc = add_halves(acc, x1, w, zero, scale, 1)
    return acc


@triton.jit
def add_halves(acc, x, w, zero, scale, place: tl.constexpr):
    """x: (M, units, 2, 2), the inputs at places place, place + 2, place + 4 and place + 6 of the words."""
    x0, x1 = tl.split(x)
    a, b = tl.split(x0)
    c, d = tl.split(x1)
    acc = tl.dot(a, four_bits(w, zero, scale, place).to(a.dtype), acc, input_precision="ieee")
    acc = tl.dot(b, four_bits(w, zero, scale, place + 4).to(b.dtype), acc, input_precision="ieee")
    acc = tl.dot(c, four_bits(w, zero, scale, place + 2).to(c.dtype), acc, input_precision="ieee")
    return tl.dot(d, four_bits(w, zero, scale, place + 6).to(d.dtype), acc, input_precision="ieee")


@triton.jit
def four_bits(words, zero, scale, place: tl.constexpr):
    """The numbers at one place of the words, scaled."""
    return (((words >> (4 * place)) & 15).to(tl.float32) - 8.0 - zero) * scale
