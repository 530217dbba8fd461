"""Products with experts in fewer bits, a step of inputs at a time, for `gemv_triton.py` and `grouped_triton.py`.

weight: a `PackedWeight` whose words are numbers of 8 bits, or int32 with eight of 4 bits each. UNIT: numbers to a word.
GROUPS: scales to a row of the weight. Whole numbers of up to 8 bits, with zero points too, and float8 are exact in 16
bits, as are those of MXFP4, whose scales are bytes. Where a row has one scale, it multiplies the sum; scales of groups
multiply the numbers before they are rounded.
"""

import triton
import triton.language as tl

from accel_kernels.gemm.quantized.operands.unpacking_triton import e2m1, wide_scale


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
def add_quantized(
    acc, x, weight, row, step, K: tl.constexpr, UNIT: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """acc + x W^T of DEPTH inputs; x: (M, DEPTH); row: (N,), which of the weight. 4-bit numbers take eight products,
    each with every eighth input.
    """
    UNITS: tl.constexpr = DEPTH // UNIT
    at = step // UNIT + tl.arange(0, UNITS)
    mask = (at < K // UNIT)[:, None]
    w = tl.load(weight.words + row[None, :] * (K // UNIT) + at[:, None], mask=mask, other=0.0)
    group = row[None, :] * GROUPS + (at * UNIT // (K // GROUPS))[:, None]
    zero = 0.0
    if weight.zeros is not None:
        zero = tl.load(weight.zeros + group, mask=mask, other=0).to(tl.float32)
    scale = 1.0
    if GROUPS > 1:
        scale = wide_scale(tl.load(weight.scales + group, mask=mask, other=0))
    if UNIT == 1:
        acc = tl.dot(x, ((w.to(tl.float32) - zero) * scale).to(x.dtype), acc, input_precision="ieee")
    else:
        x0, x1 = tl.split(tl.reshape(x, (x.shape[0], UNITS, 2, 2, 2)))
        MX: tl.constexpr = weight.scales.dtype.element_ty == tl.uint8
        acc = add_halves(acc, x0, w, zero, scale, MX, 0)
        acc = add_halves(acc, x1, w, zero, scale, MX, 1)
    return acc


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
