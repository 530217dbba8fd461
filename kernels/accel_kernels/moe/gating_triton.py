"""The gate of an expert inside kernels, in fp32, and where its weights are stored."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate


@triton.jit
def gate_and_up_rows(expert, n_idx, inner, INTERLEAVED: tl.constexpr, PRODUCTS: tl.constexpr):
    """The rows of a stack with the gates and the ups of these inner channels; both the same where PRODUCTS is 1, for
    there are no gates. expert: int64.
    """
    n_row = tl.minimum(n_idx, inner - 1)
    if PRODUCTS == 1:
        return expert * inner + n_row, expert * inner + n_row
    gate_row, up_row = n_row, inner + n_row
    if INTERLEAVED:
        gate_row, up_row = 2 * n_row, 2 * n_row + 1
    return expert * 2 * inner + gate_row, expert * 2 * inner + up_row


@triton.jit
def apply_gating(gate, up, GATING: tl.constexpr):
    """As `Gating` does. What is no number stays none, as torch's clamp leaves it."""
    ACTIVATION: tl.constexpr = GATING.activation
    if not GATING.gated:
        return activate(up, ACTIVATION)
    ALPHA: tl.constexpr = GATING.alpha
    LIMIT: tl.constexpr = GATING.limit
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ALPHA == 1.0:
        gate = activate(gate, ACTIVATION)
    else:
        gate = gate / (1.0 + tl.exp(-ALPHA * gate))
    return gate * (up + GATING.shift)
