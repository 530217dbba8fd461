"""Products with experts in fewer bits, a step of inputs at a time, for `gemv_triton.py` and `grouped_triton.py`.

weight: a `PackedWeight` whose words are numbers of 8 bits, or int32 with eight of 4 bits each. UNIT: numbers to a word.
GROUPS: scales to a row of the weight. Whole numbers of up to 8 bits, with zero points too, and float8 are exact in 16
bits, as are those of MXFP4, whose scales are bytes. Where a row has one scale, it multiplies the sum; scales of groups
multiply the numbers before they are rounded.
"""

import math

import triton
import triton.language as tl
from triton import constexpr_function

from accel_kernels.gemm.quantized.operands.factor_triton import as_operand, scaled_e2m1
from accel_kernels.gemm.quantized.operands.unpacking_triton import e2m1, numbers_by_place, side_by_side, wide_scale


@triton.jit
def scaled(y, weight, row, GROUPS: tl.constexpr):
    """Sums (.., N) times the scales of these rows (N,) of the weight, where each has one."""
    if GROUPS == 1:
        y *= wide_scale(tl.load(weight.scales + row))
    return y


@triton.jit
def shifted(y, bias_ptr, row):
    """Sums (.., N) plus the biases of these rows (N,), if there are any."""
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)
    return y


@triton.jit
def quantized_dot(x_ptr, weight, row, at, K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr):
    """What rows (N,) of the weight and a vector x give at the units `at` (B,), as (N, B), not yet added up.

    Scaled where scales are by groups.
    """
    mask = (at < K // UNIT)[None, :]
    w = tl.load(weight.words + row[:, None] * (K // UNIT) + at[None, :], mask=mask, other=0.0)
    group = row[:, None] * GROUPS + (at * UNIT // (K // GROUPS))[None, :]
    zero = 0.0
    if weight.zeros is not None:
        zero = tl.load(weight.zeros + group, mask=mask, other=0).to(tl.float32)
    if UNIT == 1:
        x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        y = (w.to(tl.float32) - zero) * x[None, :]
    else:
        y = tl.zeros(w.shape, tl.float32)
        for place in tl.static_range(UNIT):
            x = tl.load(x_ptr + at * UNIT + place, mask=at < K // UNIT, other=0.0).to(tl.float32)
            y += (((w >> (4 * place)) & 15).to(tl.float32) - 8.0 - zero) * x[None, :]
    if GROUPS > 1:
        y *= tl.load(weight.scales + group, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def inputs_at(rows, row_mask, step, K: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr):
    """(rows, DEPTH) of what begins at `rows`; zeros beyond the K inputs."""
    at = step + tl.arange(0, DEPTH)
    x = tl.load(rows[:, None] + at[None, :], mask=row_mask[:, None] & (at < K)[None, :], other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def quantized_sums(
    rows, row_mask, weight, row, second, K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRODUCTS: tl.constexpr, DEPTH: tl.constexpr, UPCAST: tl.constexpr,
    UNPACK_MODE: tl.constexpr,
):  # fmt: skip
    """x W^T, (ROWS, COLUMNS) in float32, for two lists of rows of the weight, (COLUMNS,).

    PRODUCTS: 1 computes the first list alone, and gives its sums in both places.
    rows: where each x begins. Words of 4 bits and their scales are loaded a step before they are needed: Triton lets no
    loads run ahead that are so small. Of more than one step it would give up those of x.
    """
    acc, other = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    if UNIT == 1:
        for step in range(0, K, DEPTH):
            x = inputs_at(rows, row_mask, step, K, DEPTH, UPCAST)
            acc = add_bytes(acc, x, weight, row, step, K, GROUPS, DEPTH)
            if PRODUCTS == 2:
                other = add_bytes(other, x, weight, second, step, K, GROUPS, DEPTH)
    else:
        # Of many rows the numbers lie side by side, and are one factor of a product.
        WHOLE: tl.constexpr = ROWS >= 64 and (UNPACK_MODE == "plain" or rows.dtype.element_ty != tl.float32)
        held = words_at(weight, row, 0, K, UNIT, GROUPS, DEPTH, WHOLE)
        if PRODUCTS == 2:
            more = words_at(weight, second, 0, K, UNIT, GROUPS, DEPTH, WHOLE)
        for step in range(0, K, DEPTH):
            x = inputs_at(rows, row_mask, step, K, DEPTH, UPCAST)
            ahead = words_at(weight, row, step + DEPTH, K, UNIT, GROUPS, DEPTH, WHOLE)
            if PRODUCTS == 2:
                more_ahead = words_at(weight, second, step + DEPTH, K, UNIT, GROUPS, DEPTH, WHOLE)
            acc = add_words(acc, x, weight, held, GROUPS, WHOLE, UNPACK_MODE)
            held = ahead
            if PRODUCTS == 2:
                other = add_words(other, x, weight, more, GROUPS, WHOLE, UNPACK_MODE)
                more = more_ahead
    if PRODUCTS == 1:
        other = acc
    return acc, other


@triton.jit
def add_bytes(acc, x, weight, row, step, K: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr):
    """acc + x W^T of DEPTH inputs; x: (M, DEPTH); row: (N,), which of the weight, of numbers of 8 bits."""
    at = step + tl.arange(0, DEPTH)
    mask = (at < K)[:, None]
    w = tl.load(weight.words + row[None, :] * K + at[:, None], mask=mask, other=0.0).to(tl.float32)
    group = row[None, :] * GROUPS + (at // (K // GROUPS))[:, None]
    if weight.zeros is not None:
        w -= tl.load(weight.zeros + group, mask=mask, other=0).to(tl.float32)
    if GROUPS > 1:
        w *= wide_scale(tl.load(weight.scales + group, mask=mask, other=0))
    return tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")


@constexpr_function
def span(group, words):
    """Words of a step, from any one on, that have a scale together; group: to a scale."""
    return math.gcd(group, words)


@triton.jit
def for_words(some, words, WHOLE: tl.constexpr):
    """Scales, each of a few words, as many as there are words."""
    if WHOLE:
        N: tl.constexpr = words.shape[0]
        wide = tl.broadcast_to(some[:, :, None], (N, some.shape[1], words.shape[1] // some.shape[1]))
    else:
        N: tl.constexpr = words.shape[1]
        wide = tl.broadcast_to(some[:, None, :], (some.shape[0], words.shape[0] // some.shape[0], N))
    return wide.reshape(words.shape)


@triton.jit
def words_at(
    weight, row, step, K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Words, scales and zero points of DEPTH inputs of these rows (N,): (N, words) where WHOLE, else (words, N); of
    scales and zero points one for some words. What there is none of is the words again.
    """
    SPAN: tl.constexpr = span(K // GROUPS // UNIT, DEPTH // UNIT)
    idx, part = step // UNIT + tl.arange(0, DEPTH // UNIT), step // UNIT + SPAN * tl.arange(0, DEPTH // UNIT // SPAN)
    if WHOLE:
        row, at, part = row[:, None], idx[None, :], part[None, :]
    else:
        row, at, part = row[None, :], idx[:, None], part[:, None]
    words = tl.load(weight.words + row * (K // UNIT) + at, mask=at < K // UNIT, other=0)
    mask, group = part < K // UNIT, row * GROUPS + part * UNIT // (K // GROUPS)
    scale, zero = words, words
    if GROUPS > 1:
        scale = tl.load(weight.scales + group, mask=mask, other=0)
    if weight.zeros is not None:
        zero = tl.load(weight.zeros + group, mask=mask, other=0)
    return words, scale, zero


@triton.jit
def add_words(acc, x, weight, held, GROUPS: tl.constexpr, WHOLE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """acc + x W^T; x: (M, inputs); held: of `words_at`."""
    words, scale, zero = held
    FORMAT: tl.constexpr = "mxfp4" if weight.scales.dtype.element_ty == tl.uint8 else "int4"
    if GROUPS > 1:
        scale = for_words(scale, words, WHOLE)
    if WHOLE and GROUPS > 1 and FORMAT == "mxfp4":
        w = scaled_e2m1(words, scale, x.dtype, UNPACK_MODE)
        return tl.dot(x, tl.trans(as_operand(w, UNPACK_MODE)), acc, input_precision="ieee")
    if GROUPS > 1:
        scale = wide_scale(scale)
    else:
        scale = 1.0
    if weight.zeros is not None:
        zero = for_words(zero, words, WHOLE).to(tl.float32)
    else:
        zero = 0.0
    if WHOLE:
        f = numbers_by_place(words, FORMAT, tl.float16 if x.dtype == tl.float16 else tl.bfloat16, UNPACK_MODE)
        g = ()
        for place in tl.static_range(8):
            g = g + (((f[place].to(tl.float32) - zero) * scale).to(x.dtype),)
        return tl.dot(x, tl.trans(as_operand(side_by_side(g), UNPACK_MODE)), acc, input_precision="ieee")
    else:  # eight products, each with every eighth input
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2)))
        acc = add_halves(acc, x0, words, zero, scale, FORMAT == "mxfp4", 0)
        return add_halves(acc, x1, words, zero, scale, FORMAT == "mxfp4", 1)


@triton.jit
def add_halves(acc, x, w, zero, scale, MX: tl.constexpr, place: tl.constexpr):
    """x: (M, units, 2, 2), the inputs at places place, place + 2, place + 4 and place + 6 of the words."""
    x0, x1 = tl.split(x)
    a, b = tl.split(x0)
    c, d = tl.split(x1)
    acc = tl.dot(a, four_bits(w, zero, scale, MX, place).to(a.dtype), acc, input_precision="ieee")
    acc = tl.dot(b, four_bits(w, zero, scale, MX, place + 4).to(b.dtype), acc, input_precision="ieee")
    acc = tl.dot(c, four_bits(w, zero, scale, MX, place + 2).to(c.dtype), acc, input_precision="ieee")
    return tl.dot(d, four_bits(w, zero, scale, MX, place + 6).to(d.dtype), acc, input_precision="ieee")


@triton.jit
def four_bits(words, zero, scale, MX: tl.constexpr, place: tl.constexpr):
    """The numbers at one place of the words, scaled."""
    if MX:
        return e2m1(words, place) * scale
    return (((words >> (4 * place)) & 15).to(tl.float32) - 8.0 - zero) * scale
