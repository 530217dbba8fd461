"""Logits, weights, sums of a row, and the draw: what the kernels of `sample` share.

Weights are exp((logit - the largest) / temperature). No logit is divided by the temperature, which keeps their order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

PIECE = tl.constexpr(4096)  # places that are summed together
GROUP = tl.constexpr(32)  # places of which a piece leaves the largest logit
LINES = tl.constexpr(4096 // 32)  # groups of a piece
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2139095040)  # order_of the least float above -inf: only tokens with a weight are kept
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def scale_of(temperature):
    """The factor from a difference of logits to an exponent of two; temperature 0 counts as 1."""
    one = tl.full([], LOG2E, tl.float32)  # a constant over a tensor is no tensor in Triton 3.8's interpreter
    return tl.minimum(one / tl.where(temperature > 0, temperature, 1.0), 3e38)  # finite: times zero is zero


@triton.jit
def base_of(top):
    """The logit whose weight is 1: the top, or 0 if it is infinite. So -inf has no weight, and only NaN has NaN."""
    return tl.where((top == float("inf")) | (top == -float("inf")), 0.0, top)


@triton.jit
def weight_of(x, base, scale):
    return tl.exp2((x - base) * scale)


class Logits(NamedTuple):
    """One row: where its logits are, the settings of all requests, which is this row's, and sizes as of `sample`."""

    ptr: Any
    table: Any
    row: Any
    vocabulary: Any
    words: Any


@triton.jit
def penalized(x, logits, place, mask):
    """fp32 logits after the repetition penalty."""
    table = logits.table
    if table.seen is not None:
        penalty = tl.load(table.penalty + logits.row)
        seen = tl.load(table.seen + logits.row * logits.words + place // 32, mask=mask, other=0)
        punished = tl.where(x < 0, x * penalty, tl.div_rn(x, penalty))
        x = tl.where((seen >> (place % 32)) & 1 != 0, punished, x)
    return x


@triton.jit
def logits_at(logits, place, mask):
    """fp32 after the repetition penalty; -inf where masked."""
    x = tl.load(logits.ptr + place, mask=mask, other=-float("inf")).to(tl.float32)
    return penalized(x, logits, place, mask)


@triton.jit
def places_of(piece):
    """(LINES, GROUP), in order."""
    return piece * PIECE + tl.arange(0, LINES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def row_sums(stats_ptr, pieces, scale, PIECES: tl.constexpr):
    """The largest logit of each piece and of the row, and the sum of each piece's weights, beside the row's largest.
    A sum is NaN where a logit is."""
    p_idx = tl.arange(0, PIECES)
    there = p_idx < pieces
    tops = tl.load(stats_ptr + p_idx * 2, mask=there, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(stats_ptr + p_idx * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    return tops, top, sums * weight_of(tops, base_of(top), scale)


@triton.jit
def first_beyond(masses, target, SIZE: tl.constexpr):
    """The first of the (SIZE,) fp64 masses whose running sum is beyond the target, and what is left of the target
    there. Where rounding leaves none: the last that has any mass."""
    idx = tl.arange(0, SIZE)
    some = masses > 0.0
    first = tl.min(tl.where(some & (tl.cumsum(masses, axis=0) > target), idx, SIZE), axis=0)
    at = tl.minimum(first, tl.max(tl.where(some, idx, 0), axis=0))
    return at, tl.maximum(target - tl.sum(tl.where(idx < at, masses, 0.0), axis=0), 0.0)


@triton.jit
def draw_from(weights, target):
    """Line and column of (LINES, GROUP) fp32 weights at which their running sum, line by line, passes the target."""
    line, rest = first_beyond(tl.sum(weights, axis=1).to(tl.float64), target, LINES)
    own = tl.sum(tl.where(tl.arange(0, LINES)[:, None] == line, weights, 0.0), axis=0)
    column, _rest = first_beyond(own.to(tl.float64), rest, GROUP)
    return line, column


@triton.jit
def uniform_of(seed, offset):
    """As `philox.uniform`, bit for bit: fp64. seed, offset: int64 scalars."""
    zero = tl.zeros((1,), tl.int32)
    low = zero.to(tl.uint32) + (offset & 0xFFFFFFFF).to(tl.uint32)
    high = zero.to(tl.uint32) + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, _c, _d = tl.philox(seed, zero, zero, low, high)
    bits = (a.to(tl.uint32).to(tl.int64) << 20) | (b.to(tl.uint32).to(tl.int64) >> 12)
    return (tl.max(bits, axis=0).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
