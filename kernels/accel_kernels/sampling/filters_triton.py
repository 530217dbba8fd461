"""The exact edges of top-k, top-p and min-p among the groups of a row that can hold what they keep, and the draw.

Scores are compared as integers in the same order, so that a bisection ends after at most 32 steps at a score itself.
"""

import triton
import triton.language as tl

from accel_kernels.sampling.noise_triton import noise_at

LOWEST = tl.constexpr(-2139095040)  # order_of a float above -inf: what has no weight is never listed
MARGIN = tl.constexpr(1.001)  # by more than sums in another order and logarithms are off


@triton.jit
def order_of(x):
    """fp32 as int32 in the same order; both zeros alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_order(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top):
    """exp(x - top): 1 at the top even where that is infinite, 0 at -inf."""
    return tl.where(x == -float("inf"), 0.0, tl.where(x == top, 1.0, tl.exp(x - top)))


@triton.jit
def score_at(logits_ptr, table, row, temperature, words, place, mask):
    """Logits in fp32 after the penalty and the temperature; -inf where masked. Divided as torch does, not faster."""
    x = tl.load(logits_ptr + place, mask=mask, other=-float("inf")).to(tl.float32)
    if table.seen is not None:
        penalty = tl.load(table.penalty + row)
        seen = tl.load(table.seen + row * words + place // 32, mask=mask, other=0)
        punished = tl.where(x < 0, x * penalty, tl.div_rn(x, penalty))
        x = tl.where((seen >> (place % 32)) & 1 != 0, punished, x)
    return tl.where(temperature > 0, tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)), x)


@triton.jit
def listed_scores(
    logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed, first, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Scores and places (TILE, GROUP) of the listed groups from `first` on; -inf beyond the last."""
    l_idx = first + tl.arange(0, TILE)
    group = tl.load(list_ptr + l_idx, mask=l_idx < listed, other=0)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = (l_idx < listed)[:, None] & (place < vocabulary)
    return score_at(logits_ptr, table, row, temperature, words, place, mask), place


@triton.jit
def sum_beyond(x, place, top, edge, bound, OF: tl.constexpr):
    """Over a tile, in fp32. OF: "count" of the scores from the edge on, "mass" of those beyond it, or "ties", the
    count of those at the edge whose place is the bound or later."""
    order = order_of(x)
    if OF == "count":
        part = (order >= edge).to(tl.float32)
    elif OF == "mass":
        part = tl.where(order > edge, weight_of(x, top), 0.0)
    else:
        part = ((order == edge) & (place >= bound)).to(tl.float32)
    return tl.sum(tl.sum(part, axis=1), axis=0)


@triton.jit
def listed_sum(
    x, place, top, edge, bound, logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed,
    GROUP: tl.constexpr, TILE: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """The same over all that is listed. x, place: the first tile, which stays in registers."""
    edge = edge.to(tl.int32)
    total = sum_beyond(x, place, top, edge, bound, OF)
    for first in range(TILE, listed, TILE):
        scores, places = listed_scores(
            logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed, first, GROUP, TILE
        )
        total += sum_beyond(scores, places, top, edge, bound, OF)
    return total


@triton.jit
def list_groups(
    groups_ptr, list_ptr, groups, vocabulary, top_k, top_p, min_p, top, total, GROUPS: tl.constexpr
):  # fmt: skip
    """Lists the groups that can hold what is kept; gives their number, and an order that nothing kept is below.

    Without top-k there are two bounds more, as all weights are in `total`: nothing below min-p is kept, and nothing so
    light that top-p may remove the whole vocabulary of it.
    """
    g_idx = tl.arange(0, GROUPS)
    largest = tl.load(groups_ptr + g_idx, mask=g_idx < groups, other=-float("inf"), cache_modifier=".cg")
    order = order_of(largest)
    by_mass = (top_k <= 0) & (top_p < 1.0)
    unit = tl.where(by_mass, weight_of(largest, top), 1.0)
    needed = tl.where(by_mass, top_p * total * MARGIN, top_k.to(tl.float32))
    light = tl.where(by_mass, (1.0 - top_p) * total / vocabulary, 0.0)
    light = tl.where(top_k > 0, 0.0, tl.maximum(light, min_p)) / MARGIN
    least = tl.where(light > 0.0, top + tl.log(tl.where(light > 0.0, light, 1.0)), -float("inf"))
    low = tl.maximum(order_of(least), LOWEST).to(tl.int64)
    high = tl.where(by_mass | (top_k > 0), order_of(top).to(tl.int64), low)
    while low < high:  # the largest order at which there is enough; the lowest where there never is
        middle = (low + high + 1) >> 1
        enough = tl.sum(tl.where(order >= middle.to(tl.int32), unit, 0.0), axis=0) >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    mask = order >= low.to(tl.int32)
    tl.store(list_ptr + tl.cumsum(mask.to(tl.int32), axis=0) - 1, g_idx, mask=mask)
    tl.debug_barrier()
    return tl.sum(mask.to(tl.int32), axis=0), low


@triton.jit
def draw_filtered(
    logits_ptr, table, row, temperature, words, vocabulary, seed, drawn, top, total, groups_ptr, list_ptr, groups,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The place drawn, and the sum of the weights of what is kept. total: the sum of all weights."""
    top_k, top_p, min_p = tl.load(table.top_k + row), tl.load(table.top_p + row), tl.load(table.min_p + row)
    listed, edge = list_groups(groups_ptr, list_ptr, groups, vocabulary, top_k, top_p, min_p, top, total, GROUPS)
    x, place = listed_scores(logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed, 0, GROUP, TILE)
    highest, bound = order_of(top).to(tl.int64), tl.full((), 0, tl.int64)
    if top_k > 0:
        high = highest
        while edge < high:  # the order of the k-th largest score
            middle = (edge + high + 1) >> 1
            count = listed_sum(
                x, place, top, middle, bound, logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed,
                GROUP, TILE, "count",
            )  # fmt: skip
            enough = count >= top_k
            edge, high = tl.where(enough, middle, edge), tl.where(enough, high, middle - 1)
        total = listed_sum(
            x, place, top, edge - 1, bound, logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed,
            GROUP, TILE, "mass",
        )  # fmt: skip
    if top_p < 1.0:
        needed, high, beyond = top_p * total, highest, 0.0
        while edge < high:  # the smallest order beyond which there is too little mass: that of a score
            middle = (edge + high) >> 1
            mass = listed_sum(
                x, place, top, middle, bound, logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed,
                GROUP, TILE, "mass",
            )  # fmt: skip
            little = mass < needed
            edge, high = tl.where(little, edge, middle + 1), tl.where(little, middle, high)
            beyond = tl.where(little, mass, beyond)
        ties = listed_sum(
            x, place, top, edge, bound, logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed,
            GROUP, TILE, "ties",
        )  # fmt: skip
        stay = tl.maximum(tl.ceil((needed - beyond) / weight_of(from_order(edge.to(tl.int32)), top)), 1.0)
        if stay < ties:
            later = tl.full((), 0, tl.int64) + vocabulary
            while bound + 1 < later:  # the last place from which on there are as many ties as stay
                middle = (bound + later) >> 1
                count = listed_sum(
                    x, place, top, edge, middle, logits_ptr, table, row, temperature, words, vocabulary, list_ptr,
                    listed, GROUP, TILE, "ties",
                )  # fmt: skip
                bound, later = tl.where(count >= stay, middle, bound), tl.where(count >= stay, later, middle)
    best, chosen, kept = -float("inf"), 0, 0.0
    for first in range(0, listed, TILE):
        if first > 0:
            x, place = listed_scores(
                logits_ptr, table, row, temperature, words, vocabulary, list_ptr, listed, first, GROUP, TILE
            )
        order, weight = order_of(x), weight_of(x, top)
        keep = (order > edge.to(tl.int32)) | ((order == edge.to(tl.int32)) & (place >= bound))
        keep &= (weight >= min_p) | (x == top)
        noisy = tl.where(keep, x + noise_at(seed, drawn, place), -float("inf"))
        largest = tl.max(tl.max(noisy, axis=1), axis=0)
        here = tl.min(tl.min(tl.where(noisy == largest, place, 2147483647), axis=1), axis=0)
        chosen = tl.where(largest > best, here, tl.where(largest == best, tl.minimum(here, chosen), chosen))
        best = tl.maximum(best, largest)
        kept += tl.sum(tl.sum(tl.where(keep, weight, 0.0), axis=1), axis=0)
    return chosen, kept
