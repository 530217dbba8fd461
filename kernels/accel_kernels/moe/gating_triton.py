"""The gate of an expert inside kernels, in fp32, and where its weights are stored."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate
from accel_kernels.moe.weights import PLACE_BYTES, PLACES

BYTES: tl.constexpr = tl.constexpr(PLACE_BYTES)
COLUMNS: tl.constexpr = tl.constexpr(PLACES)


@triton.jit
def placed_weight(weight, places_ptr, expert):
    """Where words, scales and zeros would begin if all experts lay as this one does, by its row of `places`; words for
    what there is not, as a function returns no None up to Triton 3.6.
    """
    words, place = weight.words, places_ptr + expert * COLUMNS
    words += offset_of(words, place)
    scales, zeros = words, words
    if weight.scales is not None:
        scales = weight.scales + offset_of(weight.scales, place + 1)
    if weight.zeros is not None:
        zeros = weight.zeros + offset_of(weight.zeros, place + 2)
    return words, scales, zeros


@triton.jit
def offset_of(base, place):
    """How many elements of the base further on something lies, anywhere in memory."""
    SIZE: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    return tl.load(place, cache_modifier=".cg") * (BYTES // SIZE)


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
