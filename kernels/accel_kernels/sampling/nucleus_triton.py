"""Rows with top-p or min-p but no top-k: the exact edge of top-p, by all programs of a row.

Nothing is sorted, as most of the vocabulary may be kept. The edge is the smallest logit beyond which there is less mass
than top-p asks for, searched among the numbers of the logits' dtype. Each launch sums the mass beyond 15 of them, which
leaves a sixteenth of the bracket: four for 16 bits. A last one sums what is kept, and counts the logits at the edge.
"""

import triton
import triton.language as tl

from accel_kernels.float_order_triton import from_order, order_of
from accel_kernels.sampling.draw_triton import (
    LOWEST,
    Logits,
    base_of,
    logits_at,
    places_of,
    row_sums,
    scale_of,
    weight_of,
)

MARGIN = tl.constexpr(1.001)  # by more than sums in another order and logarithms are off
BUCKETS = tl.constexpr(16)  # of which a turn chooses one; also the numbers that a piece has in each buffer of sums


@triton.jit
def is_nucleus(table, row, temperature):
    some = (tl.load(table.top_p + row) < 1.0) | (tl.load(table.min_p + row) > 0.0)
    return some & (tl.load(table.top_k + row) <= 0) & (temperature > 0)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The number with this key: its order without the SHIFT lowest bits, which carry nothing."""
    key = key.to(tl.int32)
    return from_order(tl.where(key < 0, (key << SHIFT) | ((1 << SHIFT) - 1), key << SHIFT))


@triton.jit
def narrowed(bracket_ptr, sums_ptr, needed, pieces, PIECES: tl.constexpr):
    """The part of a row's bracket that has the edge, by the mass beyond the last key of each part but the last."""
    low, high = tl.load(bracket_ptr, cache_modifier=".cg"), tl.load(bracket_ptr + 1, cache_modifier=".cg")
    p_idx, b_idx = tl.arange(0, PIECES)[:, None], tl.arange(0, BUCKETS)[None, :]
    mask = (p_idx < pieces) & (b_idx < BUCKETS - 1)
    beyond = tl.sum(tl.load(sums_ptr + p_idx * BUCKETS + b_idx, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
    passed = tl.sum(((beyond >= needed) & (tl.arange(0, BUCKETS) < BUCKETS - 1)).to(tl.int64), axis=0)
    step = (high - low + BUCKETS) // BUCKETS
    return tl.minimum(low + passed * step, high), tl.minimum(low + (passed + 1) * step - 1, high)


@triton.jit(do_not_specialize=("splits",))
def narrow_kernel(
    logits_ptr, table, rows_ptr, stats_ptr, given_ptr, given_sums_ptr, bracket_ptr, sums_ptr, stride, vocabulary,
    pieces, words, splits, LAST: tl.constexpr, SHIFT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A turn. given: the bracket and the sums of the turn before, None at the first. splits: programs to a row.

    LAST: the first three of a piece's numbers are the mass beyond the edge, the mass of what is kept of it, and how
    many are at the edge.
    """
    i = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    row = tl.load(rows_ptr + i).to(tl.int64)
    looked_at = False
    if row >= 0:
        looked_at = is_nucleus(table, row, tl.load(table.temperature + row))
        if not LAST:
            looked_at &= tl.load(table.top_p + row) < 1.0
    if looked_at:
        scale = scale_of(tl.load(table.temperature + row))
        top_p, min_p = tl.load(table.top_p + row), tl.load(table.min_p + row)
        _tops, top, masses = row_sums(stats_ptr + i * pieces * 2, pieces, scale, PIECES)
        total, base = tl.sum(masses.to(tl.float64), axis=0), base_of(top)
        if given_ptr is None:  # a whole vocabulary of lighter logits would weigh less than what top-p removes
            light = (1.0 - top_p) * total.to(tl.float32) / (vocabulary * MARGIN)
            least = tl.maximum(order_of(base + tl.log2(light) / scale), LOWEST)
            high = (order_of(top) >> SHIFT).to(tl.int64)
            low = tl.minimum((least >> SHIFT).to(tl.int64), high)
        else:
            given_sums_ptr += i * pieces * BUCKETS
            low, high = narrowed(given_ptr + i * 2, given_sums_ptr, top_p * total, pieces, PIECES)
        if split == 0:
            tl.store(bracket_ptr + i * 2, low)
            tl.store(bracket_ptr + i * 2 + 1, high)
        step = (high - low + BUCKETS) // BUCKETS
        edge = tl.where(top_p < 1.0, value_of(low, SHIFT), -float("inf"))
        first, last = pieces * split // splits, pieces * (split + 1) // splits
        if not LAST:
            last = tl.where(low < high, last, first)
        logits = Logits(logits_ptr + i * stride, table, row, vocabulary, words)
        for piece in range(first, last):
            place = places_of(piece)
            x = logits_at(logits, place, place < vocabulary)
            weights = weight_of(x, base, scale)
            sum_ptr = sums_ptr + (i * pieces + piece) * BUCKETS
            if LAST:
                beyond = tl.where(x > edge, weights, 0.0)
                tl.store(sum_ptr, tl.sum(beyond))
                tl.store(sum_ptr + 1, tl.sum(tl.where((weights >= min_p) | (x == top), beyond, 0.0)))
                tl.store(sum_ptr + 2, tl.sum((x == edge).to(tl.float32)))
            else:
                for part in tl.static_range(BUCKETS - 1):
                    pivot = value_of(tl.minimum(low + (part + 1) * step - 1, high), SHIFT)
                    tl.store(sum_ptr + part, tl.sum(tl.where(x > pivot, weights, 0.0)))


@triton.jit
def kept_masses(
    table, row, base, top, scale, needed, bracket_ptr, sums_ptr, pieces, SHIFT: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """Of each piece (PIECES,): the mass of what is kept, and how many at the edge stay, the last ones; and the edge.
    needed: mass of top-p, in fp64 as all that decides how many stay."""
    p_idx = tl.arange(0, PIECES)
    there, sum_ptr = p_idx < pieces, sums_ptr + p_idx * BUCKETS
    beyond = tl.load(sum_ptr, mask=there, other=0.0, cache_modifier=".cg")
    masses = tl.load(sum_ptr + 1, mask=there, other=0.0, cache_modifier=".cg")
    stay, edge = tl.zeros((PIECES,), tl.float32), -float("inf")
    if tl.load(table.top_p + row) < 1.0:
        ties = tl.load(sum_ptr + 2, mask=there, other=0.0, cache_modifier=".cg")
        edge = value_of(tl.load(bracket_ptr, cache_modifier=".cg"), SHIFT)
        weight = weight_of(edge, base, scale)
        lacking = (needed - tl.sum(beyond.to(tl.float64), axis=0)) / tl.where(weight > 0.0, weight, 1.0)
        later = tl.sum(ties, axis=0) - tl.cumsum(ties, axis=0)
        stay = tl.minimum(tl.maximum(tl.maximum(tl.ceil(lacking), 1.0).to(tl.float32) - later, 0.0), ties)
        stay = tl.where((weight >= tl.load(table.min_p + row)) | (edge == top), stay, 0.0)
        masses += stay * weight
    return masses, stay, edge


@triton.jit
def kept_of(x, weights, top, edge, stay, min_p):
    """Which of a piece's logits are kept. stay: how many at the edge do."""
    tied = (x == edge).to(tl.int32)
    lines = tl.sum(tied, axis=1)
    lines_later = tl.sum(lines, axis=0) - tl.cumsum(lines, axis=0)
    later = (lines_later + lines)[:, None] - tl.cumsum(tied, axis=1)
    return ((x > edge) & ((weights >= min_p) | (x == top))) | ((tied > 0) & (later < stay))
