"""fp32 numbers as integers in the same order, so that kernels can search them bit by bit, and beside their places."""

import triton
import triton.language as tl

NEVER = tl.constexpr(-(2**63))  # below the order of every number, with its place


@triton.jit
def order_of(x):
    """fp32 as int32 in the same order; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def in_order(x, place):
    """Integers in the order of x, fp32: NaN above all, zeros equal, and of equals the lower place above."""
    order = tl.where(x != x, 0x7FFFFFFF, order_of(x))
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
