"""One token for each row of logits: penalty, temperature, top-k, top-p, min-p, and a draw by one uniform number.

Meaning and order are those of transformers' processors: repetition penalty (Keskar et al. 2019), temperature, top-k
(Fan et al. 2018), top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024). The token is the place at which the running
sum of exp(scores) passes u times the whole sum, for a uniform number u by seed and count.
"""

import torch

from accel_kernels.op import dtype_reason, make_op, random_cases
from accel_kernels.sampling.philox import uniform
from accel_kernels.sampling.table import WORD, SamplingTable, seen_words

NONE = -1  # the id where nothing was drawn
MOST_VOCABULARY = 1 << 19  # whose groups one program can hold in registers


def reference(logits, table, rows, *, filters, nucleus=True, logprobs=False):
    """logits: (N, V) of floats, computed in fp32; table: a `SamplingTable` of R requests; rows: (N,) int32 or int64.

    Row i of the logits is of request rows[i], each of which stands there once; -1 means that nothing is drawn.
    filters: whether any of these requests has top-k, top-p or min-p; without it they are not looked at. nucleus:
    whether any has top-p or min-p without top-k; without it these count beside top-k only, and launches are fewer.

    Returns ids (N,) int64, or with logprobs (ids, (N,) fp32): log_softmax of the processed scores at the id. An id is
    -1, and its logprob NaN, where the row is -1, its logits have a NaN, or none of them is above -inf. Greedy takes
    the first of the largest. +inf is larger than all others, the first of them is taken with a log probability of 0,
    whatever the filters. Of equal scores at the edge of top-k all stay; of those at the edge of top-p as many as are
    needed, the last places first, as a stable sort has them.

    Changed in place, for requests that got an id: `table.drawn` grows by one, `table.seen` has the id.
    """
    alive, at = rows >= 0, rows.clamp(min=0).long()
    scores = logits.float()
    if table.seen is not None:
        scores = _penalized(scores, table.seen[at], table.penalty[at, None])
    temperature = table.temperature[at, None]
    scores = torch.where(temperature > 0, scores / torch.where(temperature > 0, temperature, 1.0), scores)
    top, first = scores.amax(-1, keepdim=True), scores.argmax(-1)
    alive = alive & (top[:, 0] > -torch.inf)  # amax hands NaN on
    sampled = (temperature > 0) & (top < torch.inf)
    if filters:
        on = sampled if nucleus else sampled & (table.top_k[at, None] > 0)
        scores = _filtered(scores, top, on, *(t[at, None] for t in (table.top_k, table.top_p, table.min_p)))
    numbers = uniform(table.seeds[at], table.drawn[at])
    for i in (alive & sampled[:, 0]).nonzero().flatten():
        first[i] = _drawn(weights_of(scores[i], top[i]), numbers[i])
    ids = torch.where(alive, first, NONE)
    table.drawn.index_add_(0, at, alive.to(torch.int64))
    if table.seen is not None:
        _add_seen(table.seen, at, ids)
    if not logprobs:
        return ids
    found = scores.gather(1, ids.clamp(min=0)[:, None]) - top
    found = torch.where(top < torch.inf, found - weights_of(scores, top).sum(-1, keepdim=True).log(), 0.0)
    return ids, torch.where(alive, found[:, 0], torch.nan)


def weights_of(scores: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(scores - top). NaN where the top is infinite; such a row is not drawn from."""
    return torch.exp(scores - top)


def _drawn(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The first place at which the running sum of the weights (V,) passes this share of the whole."""
    running = weights.double().cumsum(0)
    beyond = torch.searchsorted(running, number * running[-1], right=True)
    return torch.minimum(beyond, torch.searchsorted(running, running[-1]))  # no place without weight by rounding


def _penalized(scores: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """seen: (N, words)."""
    place = torch.arange(scores.shape[1], device=scores.device)
    there = (seen[:, place // WORD] >> (place % WORD) & 1) != 0
    return torch.where(there, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _filtered(scores, top, on, top_k, top_p, min_p) -> torch.Tensor:
    """-inf where a filter removes a token; settings (N, 1). on: whether the row's filters count."""
    few, nucleus = on & (top_k > 0), on & (top_p < 1)
    if few.any():
        count = torch.where(few, top_k, 1).clamp(max=scores.shape[1]).long()
        least = scores.topk(int(count.max())).values.gather(1, count - 1)
        scores = scores.masked_fill((scores < least) & few, -torch.inf)
    if nucleus.any():
        order = scores.sort(stable=True, dim=-1)
        weights = weights_of(order.values, top).double().flip(-1)  # the largest first
        above = weights.cumsum(-1) - weights
        out = (above >= top_p.double() * weights.sum(-1, keepdim=True)) & nucleus
        out[:, :1] = False
        scores = scores.masked_fill(torch.zeros_like(out).scatter(1, order.indices, out.flip(-1)), -torch.inf)
    return scores.masked_fill((weights_of(scores, top) < min_p) & on & (scores < top), -torch.inf)


def _add_seen(seen: torch.Tensor, at: torch.Tensor, ids: torch.Tensor) -> None:
    """Sets the bits of the ids; adds what is missing, so that rows that stand for nothing change nothing."""
    word, bit = ids.clamp(min=0) // WORD, torch.ones_like(ids) << ids.clamp(min=0) % WORD
    missing = (ids >= 0) & (seen[at, word] & bit == 0)
    seen.view(-1).index_add_(0, at * seen.shape[1] + word, torch.where(missing, bit, 0).to(torch.int32))


def supports(logits, table, rows, *, filters, nucleus=True, logprobs=False) -> str | None:
    if (reason := dtype_reason(logits, table.temperature)) is not None:
        return reason
    if logits.numel() == 0:
        return "empty"
    if logits.stride(1) != 1:
        return "not contiguous along the vocabulary"
    if logits.shape[1] > MOST_VOCABULARY:
        return f"a vocabulary of {logits.shape[1]}, more than {MOST_VOCABULARY}"
    if rows.shape != logits.shape[:1] or rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        return "rows are not one int32 or int64 for each row of logits"
    if any(t is not None and not t.is_contiguous() for t in table):
        return "table not contiguous"
    return None


@random_cases
def _case(rand, n, vocabulary, *, filters=True, greedy=False, penalty=False, logprobs=False, wide=1):
    """Every combination of settings in turn. wide: times the vocabulary, the logits being a part of wider rows."""
    device = rand.device
    logits = rand(n, wide * vocabulary, spread=3.0)[:, :vocabulary]

    def column(*values, dtype=torch.float32):
        """The values in turn; requests stand in the table the other way round."""
        return torch.tensor([values[i % len(values)] for i in range(n)][::-1], dtype=dtype, device="cpu").to(device)

    seen = torch.randint(-(2**31), 2**31, (n, seen_words(vocabulary)), generator=rand.generator, device="cpu").to(
        device, torch.int32
    )
    table = SamplingTable(
        temperature=column(0.0) if greedy else column(1.0, 0.7, 1.5, 0.0, 0.9),
        top_k=column(0, 5, 50, dtype=torch.int32),
        top_p=column(1.0, 0.9, 1.0, 0.5),
        min_p=column(0.0, 0.0, 0.05, 0.0),
        penalty=column(1.2, 1.0, 0.8),
        seeds=column(*(7 + 2**40 * i for i in range(n)), dtype=torch.int64),
        drawn=column(*(3 * i for i in range(n)), dtype=torch.int64),
        split_counters=torch.zeros(n, dtype=torch.int32, device="cpu").to(device),
        seen=seen if penalty else None,
    )
    rows = torch.tensor([i if i % 7 != 5 else NONE for i in reversed(range(n))], dtype=torch.int32, device="cpu").to(
        device
    )
    return (logits, table, rows), {"filters": filters, "logprobs": logprobs}


CASES = (
    _case("greedy", 3, 77, filters=False, greedy=True, small=True),
    _case("greedy-wide", 2, 5003, filters=False, greedy=True, logprobs=True, wide=2, small=True),
    _case("one", 1, 1, filters=False, small=True),
    _case("plain", 6, 1001, filters=False, small=True),
    _case("plain-logprobs", 5, 4099, filters=False, logprobs=True, wide=2, small=True),
    _case("penalty", 4, 515, filters=False, penalty=True, logprobs=True, small=True),
    _case("filters", 13, 331, small=True),
    _case("filters-pieces", 4, 8197, logprobs=True, small=True),
    _case("all", 6, 4500, penalty=True, logprobs=True, wide=3, small=True),
    _case("llama-greedy", 512, 128256, filters=False, greedy=True),
    _case("llama-greedy-1", 1, 128256, filters=False, greedy=True),
    _case("llama-plain", 512, 128256, filters=False),
    _case("qwen-plain-1", 1, 151936, filters=False),
    _case("llama-filters", 512, 128256),
    _case("qwen-filters-8", 8, 151936, penalty=True),
    _case("gemma-filters-logprobs", 64, 262144, logprobs=True),
)

sample = make_op("sample", reference, supports, CASES, changes=True)
