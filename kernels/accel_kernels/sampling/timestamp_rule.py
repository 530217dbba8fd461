"""Which tokens may follow in a text with times, as Whisper writes it: scores with -inf for all others, in one launch.

Times come in pairs but for the last one, and none is before the one in front of it.
"""

import torch

from accel_kernels.op import dtype_reason, make_op, random_cases

NEVER = -float("inf")


def reference(scores, begun, suppressed=None, counters=None, *, first, end, initial=None, by_sum=True):
    """scores: (rows, V); begun: (rows, new) int64, the tokens after the prompt. Returns (rows, V).

    first: the token of the first time, up to the end of V; the one before it, which says that there are no times, never
    comes. end: the token behind all words, which ends a text. initial: the last time, counted from `first`, that a text
    may begin with; None for any. by_sum: only times may come where all times together are likelier than any token of
    text. suppressed: (V,) bool, tokens that never come, or None. counters: (rows,) int32 zeros, that the kernel counts
    by and leaves as zeros; None: it makes its own.
    """
    scores = scores.clone() if suppressed is None else scores.masked_fill(suppressed, NEVER)
    text, times = scores[:, :first], scores[:, first:]
    scores[:, first - 1] = NEVER
    if begun.shape[1]:
        stamped = begun >= first
        last, before = stamped[:, -1:], stamped[:, -2:-1] if begun.shape[1] > 1 else stamped.new_ones(1, 1)
        pair, opened = last & before, last & ~before
        times.masked_fill_(pair, NEVER)
        scores[:, :end].masked_fill_(opened, NEVER)
        places = torch.arange(1, begun.shape[1] + 1, device=begun.device)
        latest = (stamped * places).amax(1, keepdim=True)  # 0 for none
        least = begun.gather(1, (latest - 1).clamp(min=0)) - first + ~opened
        columns = torch.arange(times.shape[1], device=begun.device)
        times.masked_fill_((latest > 0) & (columns < least), NEVER)
    else:
        text.fill_(NEVER)
        if initial is not None:
            times[:, initial + 1 :] = NEVER
    if by_sum:
        logprobs = torch.nn.functional.log_softmax(scores.float(), dim=-1)
        likelier = logprobs[:, first:].logsumexp(-1) > logprobs[:, :first].amax(-1)
        text.masked_fill_(likelier[:, None], NEVER)
    return scores


def supports(scores, begun, suppressed=None, counters=None, *, first, end, initial=None, by_sum=True) -> str | None:
    if scores.dim() != 2 or scores.numel() == 0 or scores.stride(1) != 1:
        return f"scores of shape {tuple(scores.shape)}, or not contiguous rows"
    if begun.dim() != 2 or len(begun) != len(scores) or begun.dtype != torch.int64 or begun.device != scores.device:
        return "tokens in another form than (rows, tokens), int64"
    if any(type(one) is not int or one < 0 for one in (first, end, 0 if initial is None else initial)):
        return "tokens that are not one number each"
    if not 0 < first < scores.shape[1]:
        return "no tokens of times"
    if suppressed is not None and (suppressed.dtype != torch.bool or suppressed.shape != scores.shape[1:]):
        return "suppressed tokens in another form than (V,) bool"
    if suppressed is not None and not suppressed.is_contiguous():
        return "suppressed tokens not contiguous"
    return dtype_reason(scores)


@random_cases
def _case(rand, rows, n, new, times=0.4, suppressed=False, **more):
    """times: the share of tokens before that are times, of which there are n // 4."""
    first = n - n // 4
    scores = rand(rows, n, spread=3.0)
    spoken = (rand.uniform(rows, new + 2) * (first - 1)).long()
    timed = first + (rand.uniform(rows, new + 2) * (n // 4)).long()
    begun = torch.where(rand.uniform(rows, new + 2) < times, timed, spoken)[:, 2:]
    given = {"suppressed": rand.uniform(n) < 0.2} if suppressed else {}
    return (scores, begun), given | {"first": first, "end": first - 9} | more


CASES = (
    _case("first", 3, 97, 0, initial=5, suppressed=True, small=True),
    _case("second", 4, 131, 1, small=True),
    _case("later", 24, 4200, 2, suppressed=True, small=True),
    _case("long", 3, 97, 300, times=0.01, small=True),
    _case("each-alone", 5, 97, 7, by_sum=False, small=True),
    _case("whisper", 1, 51866, 100, suppressed=True),
    _case("whisper-64", 64, 51866, 100, suppressed=True),
)

timestamp_rule = make_op("timestamp_rule", reference, supports, CASES)
