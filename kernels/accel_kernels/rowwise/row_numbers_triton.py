"""The functions of `row_numbers` for kernels, on tiles of fp32. What lies beyond the end of a row is given as 0."""

import triton
import triton.language as tl

from accel_kernels.rowwise.row_numbers import LEAST_PEAK

SMALLEST = tl.constexpr(LEAST_PEAK)


@triton.jit
def magnitude(x):
    """|x|, infinite for NaN: a maximum passes over NaN; as infinity it shows, and makes the scale of the row NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_tile(peak, REACH: tl.constexpr):
    return tl.where(peak < float("inf"), tl.div_rn(peak, tl.full(peak.shape, REACH, tl.float32)), float("nan"))


@triton.jit
def numbers_tile(x, peak, REACH: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, ROUND: tl.constexpr):
    # A peak is exactly half a step beyond 127: it is set, so that no earlier rounding decides its number.
    factor = tl.div_rn(tl.full(peak.shape, REACH, tl.float32), peak)
    y = tl.where(tl.abs(x) == peak, tl.where(x < 0, -REACH, REACH), x * factor)
    return bounded_tile(y, LEAST, MOST, ROUND)


@triton.jit
def int8_tile(x, peak, REACH: tl.constexpr, MOST: tl.constexpr):
    """As `numbers_tile`, of rows with this peak, in int8: the sum below ends in the bits of the number."""
    factor = tl.div_rn(tl.full(peak.shape, REACH, tl.float32), peak)
    y = tl.where(tl.abs(x) == peak, tl.where(x < 0, -REACH, REACH), x * factor)
    y = tl.minimum(tl.where(y == y, y, 0.0), MOST)  # none is less than the least
    return (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def float8_tile(x, peak, REACH: tl.constexpr, BY_HAND: tl.constexpr):
    """As `numbers_tile`, of rows with this peak, in float8_e4m3fn: to which what a product is off rounds to nothing.

    BY_HAND: see `nearest_float8`.
    """
    y = x * tl.div_rn(tl.full(peak.shape, REACH, tl.float32), peak)
    y = tl.where(y == y, y, 0.0)
    if BY_HAND:
        y = nearest_float8(y)
    return y.to(tl.float8e4nv)


@triton.jit
def nearest_float8(y):
    """The nearest number that float8_e4m3fn has, to even, in float32, so that the conversion behind it is exact.

    Triton before 3.9 converts by way of float16 below compute 9.0, which it cuts off: numbers just above the middle of
    two then go down.
    """
    bits = y.to(tl.int32, bitcast=True)
    wide = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = ((tl.abs(y) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)  # of steps of 2 ** -9, below 2 ** -6
    small = (small | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(y == y, tl.where(tl.abs(y) < 0.015625, small, wide), y)


@triton.jit
def bounded_tile(y, LEAST: tl.constexpr, MOST: tl.constexpr, ROUND: tl.constexpr):
    """Between least and largest number; ROUND: the nearest whole one."""
    y = tl.where(y == y, y, 0.0)
    if ROUND:  # to even, as torch: the sum has no bits left for the fraction
        y = (y + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(y, LEAST), MOST)
