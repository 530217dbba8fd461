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
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def gelu(x):
    """Exact GELU, x * Phi(x), with erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26): a third of libdevice's instructions.

    The tail is computed as such, so that small values keep their digits.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = t * (-1.453152027 + t * 1.061405429)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + series)))
    tail = 0.5 * series * tl.exp2(z * z * -1.4426950408889634)
    return x * tl.where(x < 0, tail, 1.0 - tail)
