"""Activation functions inside kernels, by the names of `accel_kernels.norm.norm.ACTIVATIONS`; fp32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """ACTIVATION(x); x itself for None."""
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_quick":
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    return x


@triton.jit
def activate_fast(x, ACTIVATION: tl.constexpr):
    """ACTIVATION(x) to 6e-7 of the largest value and, above -6, to 6e-5 of its own: for results of 16 bits.

    By half the instructions, which an epilogue behind short sums is bound by. Infinities and NaN are as torch's.
    """
    if ACTIVATION == "silu":
        x = x * sigmoid_fast(x)
    elif ACTIVATION == "gelu":
        x = _gelu(x)
    elif ACTIVATION == "gelu_tanh":
        x = x * _reciprocal(1.0 + tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * x * x)))
    elif ACTIVATION == "gelu_quick":
        x = x * sigmoid_fast(1.702 * x)
    else:
        x = activate(x, ACTIVATION)
    return x


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact for small ones too (Kahan); x itself above 20, as torch's."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))  # 1 + e rounds e, and u - 1 is what is left of it
    return tl.where(x > 20.0, x, small)


@triton.jit
def sigmoid_fast(x):
    """Off by a few units in the last place of fp32."""
    return _reciprocal(1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def _reciprocal(x):
    """1 / x of a positive x: one instruction and a product, where a division takes six."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _gelu(x):
    """x * Phi(x). The logarithm of the tail, Phi(-|x|), is a polynomial: its least largest error over 0 to 6.5, where
    that may grow as GELU gets small. Beyond, both tails vanish.
    """
    a = tl.abs(x)
    p = 5.924719152972102e-05 - 1.705282329567126e-06 * a
    p = 0.008454863913357258 + a * (-0.0009143523639068007 + a * p)
    p = -0.4585273563861847 + a * (-0.05387445539236069 + a * p)
    tail = tl.exp2(-0.9999959468841553 + a * (-1.15123450756073 + a * p))
    return x * tl.where(x < 0, tail, 1.0 - tail)
