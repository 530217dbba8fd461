"""fp32 numbers as integers in the same order, so that kernels can search them bit by bit, and beside their places."""

import triton
import triton.language as tl


@triton.jit
def order_of(x):
    """fp32 as int32 in the same order; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
