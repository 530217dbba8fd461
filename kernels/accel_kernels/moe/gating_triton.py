"""The gate of an expert inside kernels; fp32."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate


@triton.jit
def apply_gating(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """As `Gating`. What is no number stays none, as torch's clamp leaves it."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ALPHA == 1.0:
        gate = activate(gate, KIND)
    else:
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    return gate * (up + SHIFT)
