"""Functions of numbers as CUDA's own library computes them, which torch calls too; Triton's own in its interpreter."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from accel_kernels.device import interpreted
from accel_kernels.elementwise.activations_triton import activate_fast, sigmoid_fast

INTERPRETED = tl.constexpr(interpreted())
library = tl if interpreted() else libdevice


@triton.jit
def larger(a, b):
    """The larger one; NaN where one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def bfloat16(x):
    """x in bf16, the nearest one; the interpreter only cuts digits off, from which this rounds first."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(tl.bfloat16)


@triton.jit
def divided(number, x):
    return tl.math.div_rn(tl.full(x.shape, number, tl.float32), x)


@triton.jit
def sigmoid(x):
    return divided(1.0, 1.0 + library.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0 if INTERPRETED else libdevice.tanh(x)


@triton.jit
def silu(x):
    return tl.math.div_rn(x, 1.0 + library.exp(-x))


# The sums below are one instruction with the product before them, as in torch's kernels.
@triton.jit
def gelu_erf(x):
    return x * 0.5 * (1.0 + library.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    inner = 0.7978845608028654 * tl.fma(x * x * x, tl.full(x.shape, 0.044715, tl.float32), x)
    return 0.5 * x * (1.0 + tanh(inner))


# For what is rounded to 8 bits afterwards, and is nothing else.
@triton.jit
def near_sigmoid(x):
    return sigmoid_fast(x)


@triton.jit
def near_silu(x):
    return activate_fast(x, "silu")


@triton.jit
def near_gelu_tanh(x):
    return activate_fast(x, "gelu_tanh")
