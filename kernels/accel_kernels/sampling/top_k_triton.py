"""Rows with top-k: the exact edges of top-k and top-p among the groups that can hold what is kept, and the draw.

The k-th largest of the groups' largest logits is no larger than the k-th largest logit. So only the groups that reach
it, about k of them, are read. Logits are compared as integers in the same order: a bisection ends in 32 steps.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from accel_kernels.float_order_triton import from_order, order_of
from accel_kernels.sampling.draw_triton import GROUP, LINES, LOWEST, draw_from, logits_at, weight_of


class Listed(NamedTuple):
    """Groups that may hold what is kept: x, place of the first LINES, in registers; top, scale as of `weight_of`."""

    logits: Any
    ptr: Any
    number: Any
    x: Any
    place: Any
    top: Any
    scale: Any


@triton.jit
def listed_logits(logits, list_ptr, number, first):
    """Logits and places (LINES, GROUP) of the listed groups from `first` on; -inf beyond the last."""
    l_idx = first + tl.arange(0, LINES)
    group = tl.load(list_ptr + l_idx, mask=l_idx < number, other=0)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (l_idx < number)[:, None] & (place < logits.vocabulary)
    return logits_at(logits, place, mask), place


@triton.jit
def sum_beyond(x, place, top, scale, edge, bound, OF: tl.constexpr):
    """Over a tile, in fp32. OF: "count" of the logits from the edge on, "mass" of those beyond it, or "ties", the
    count of those at the edge whose place is the bound or later."""
    order = order_of(x)
    if OF == "count":
        part = (order >= edge).to(tl.float32)
    elif OF == "mass":
        part = tl.where(order > edge, weight_of(x, top, scale), 0.0)
    else:
        part = ((order == edge) & (place >= bound)).to(tl.float32)
    return tl.sum(part)


@triton.jit
def listed_sum(listed, edge, bound, OF: tl.constexpr):
    """The same over all that is listed."""
    edge = edge.to(tl.int32)
    total = sum_beyond(listed.x, listed.place, listed.top, listed.scale, edge, bound, OF)
    for first in range(LINES, listed.number, LINES):
        x, place = listed_logits(listed.logits, listed.ptr, listed.number, first)
        total += sum_beyond(x, place, listed.top, listed.scale, edge, bound, OF)
    return total


@triton.jit
def list_groups(groups_ptr, list_ptr, groups, top_k, top, GROUPS: tl.constexpr):
    """Lists the groups that can hold what is kept; gives their number, and an order that nothing kept is below."""
    g_idx = tl.arange(0, GROUPS)
    largest = tl.load(groups_ptr + g_idx, mask=g_idx < groups, other=-float("inf"), cache_modifier=".cg")
    order = order_of(largest)
    low, high = tl.full((), LOWEST, tl.int64), order_of(top).to(tl.int64)
    while low < high:  # the largest order at which there is enough; the lowest where there never is
        middle = (low + high + 1) >> 1
        enough = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), axis=0) >= top_k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    mask = order >= low.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(mask.to(tl.int32), axis=0) - 1, g_idx, mask=mask)
    tl.debug_barrier()
    return tl.sum(mask.to(tl.int32), axis=0), low


@triton.jit
def kept_weights(x, place, top, scale, edge, bound, min_p):
    order, weight = order_of(x), weight_of(x, top, scale)
    keep = (order > edge.to(tl.int32)) | ((order == edge.to(tl.int32)) & (place >= bound))
    return tl.where(keep & ((weight >= min_p) | (x == top)), weight, 0.0)


@triton.jit
def draw_top_k(logits, uniform, top, scale, groups_ptr, list_ptr, groups, GROUPS: tl.constexpr):
    """The place drawn, and the sum of the weights of what is kept. uniform: fp64 in (0, 1)."""
    table, row = logits.table, logits.row
    top_k, top_p, min_p = tl.load(table.top_k + row), tl.load(table.top_p + row), tl.load(table.min_p + row)
    number, edge = list_groups(groups_ptr, list_ptr, groups, top_k, top, GROUPS)
    x, place = listed_logits(logits, list_ptr, number, 0)
    listed = Listed(logits, list_ptr, number, x, place, top, scale)
    highest, bound = order_of(top).to(tl.int64), tl.full((), 0, tl.int64)
    high = highest
    while edge < high:  # the order of the k-th largest logit
        middle = (edge + high + 1) >> 1
        enough = listed_sum(listed, middle, bound, "count") >= top_k
        edge, high = tl.where(enough, middle, edge), tl.where(enough, high, middle - 1)
    if top_p < 1.0:
        total = listed_sum(listed, edge - 1, bound, "mass")
        needed, high, beyond = top_p.to(tl.float64) * total, highest, 0.0
        while edge < high:  # the smallest order beyond which there is too little mass: that of a logit
            middle = (edge + high) >> 1
            mass = listed_sum(listed, middle, bound, "mass")
            little = mass < needed
            edge, high = tl.where(little, edge, middle + 1), tl.where(little, middle, high)
            beyond = tl.where(little, mass, beyond)
        ties = listed_sum(listed, edge, bound, "ties")
        stay = tl.maximum(tl.ceil((needed - beyond) / weight_of(from_order(edge.to(tl.int32)), top, scale)), 1.0)
        if stay < ties:
            later = tl.full((), 0, tl.int64) + logits.vocabulary
            while bound + 1 < later:  # the last place from which on there are as many ties as stay
                middle = (bound + later) >> 1
                count = listed_sum(listed, edge, middle, "ties")
                bound, later = tl.where(count >= stay, middle, bound), tl.where(count >= stay, later, middle)
    kept = tl.sum(kept_weights(x, place, top, scale, edge, bound, min_p)).to(tl.float64)
    for first in range(LINES, number, LINES):
        more, places = listed_logits(logits, list_ptr, number, first)
        kept += tl.sum(kept_weights(more, places, top, scale, edge, bound, min_p)).to(tl.float64)
    rest, chosen, first = uniform * kept, tl.full((), 0, tl.int32), 0
    while (first < number) & (rest >= 0.0):
        if first > 0:
            x, place = listed_logits(logits, list_ptr, number, first)
        weights = kept_weights(x, place, top, scale, edge, bound, min_p)
        mass = tl.sum(weights)
        if mass > 0.0:  # a later tile takes its place if this one's mass does not reach
            line, column = draw_from(weights, rest)
            chosen = tl.load(list_ptr + first + line) * GROUP + column
        rest -= mass.to(tl.float64)
        first += LINES
    return chosen, kept.to(tl.float32)
