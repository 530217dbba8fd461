"""Activation functions inside kernels, by the names of `accel_kernels.norm.norm.ACTIVATIONS`; fp32."""

import triton
import triton.language as tl


@triton.jit
def activate(x, KIND: tl.constexpr):
    """KIND(x); x itself for None."""
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    return x
