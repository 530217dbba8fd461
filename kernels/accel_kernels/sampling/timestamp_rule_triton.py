"""Programs write a piece of a row each; the last one of a row then knows whether times are likelier than text.

NaN among the scores of a row, or infinity, leaves all probabilities NaN in torch: nothing is likelier then.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

PIECE = 2048  # scores to a program
TOKENS = tl.constexpr(128)  # of the text, to a step


@triton.jit
def latest_time(begun_ptr, step, new, first):
    """The last token of times in a row, -1 for none."""
    at = tl.arange(0, TOKENS)
    place, found = new, -1
    while (place > 0) & (found < 0):
        place -= TOKENS
        tokens = tl.load(begun_ptr + (place + at) * step, mask=place + at >= 0, other=-1)
        latest = tl.max(tl.where(tokens >= first, at, -1), axis=0)
        found = tl.max(tl.where((at == latest) & (tokens >= first), tokens, -1), axis=0).to(tl.int32)
    return found


@triton.jit
def is_time(begun_ptr, step, at, first, other):
    """Whether the token at this place is one; `other` where there is no such place."""
    return tl.where(at >= 0, tl.load(begun_ptr + at * step, mask=at >= 0, other=0) >= first, other)


@triton.jit(do_not_specialize=("token_row", "token_step", "new", "first", "end", "initial", "pieces"))
def timestamp_rule_kernel(
    scores_ptr, begun_ptr, suppressed_ptr, stats_ptr, counters_ptr, y_ptr, row_step, token_row, token_step, n, new,
    first, end, initial, pieces, PIECE: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """stats: (rows, pieces, 3) of text the largest score, of times that and the sum of e^(score - it); NaN in the first
    where one is seen. None, as counters, where sums are not asked for.
    """
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = piece * PIECE + tl.arange(0, PIECE)
    there = at < n
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begun_ptr += row * token_row
    last = is_time(begun_ptr, token_step, new - 1, first, False)
    before = is_time(begun_ptr, token_step, new - 2, first, True)
    latest = latest_time(begun_ptr, token_step, new, first)
    x = tl.load(scores_ptr + row * row_step + at, mask=there, other=0.0)
    text = at < first
    never = (at == first - 1) | (~text & last & before) | ((at < end) & last & ~before)
    least = tl.where(last & ~before, latest, latest + 1)
    never |= ~text & (latest >= 0) & (at < least)
    never |= (new == 0) & text
    if initial is not None:
        never |= (new == 0) & (at > first + initial)
    if suppressed_ptr is not None:
        never |= tl.load(suppressed_ptr + at, mask=there, other=0) != 0
    x = tl.where(never, -float("inf"), x)
    y_ptr += row * n
    tl.store(y_ptr + at, x, mask=there)
    if stats_ptr is not None:
        x = tl.where(there, x, -float("inf")).to(tl.float32)
        wrong = tl.max((x != x).to(tl.int32), axis=0) != 0
        x = tl.where(x != x, 0.0, x)
        top_text = tl.max(tl.where(text, x, -float("inf")), axis=0)
        timed = tl.where(text, -float("inf"), x)
        top = tl.max(timed, axis=0)
        total = tl.sum(tl.exp(timed - tl.where(top == -float("inf"), 0.0, top)), axis=0)
        stats_ptr += row * pieces * 3
        tl.store(stats_ptr + piece * 3, tl.where(wrong, float("nan"), top_text))
        tl.store(stats_ptr + piece * 3 + 1, top)
        tl.store(stats_ptr + piece * 3 + 2, total)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") == pieces - 1:
            tl.atomic_xchg(counters_ptr + row, 0)
            p = tl.arange(0, PIECES)
            tops = tl.load(stats_ptr + p * 3, mask=p < pieces, other=-float("inf"))
            peaks = tl.load(stats_ptr + p * 3 + 1, mask=p < pieces, other=-float("inf"))
            totals = tl.load(stats_ptr + p * 3 + 2, mask=p < pieces, other=0.0)
            peak = tl.max(peaks, axis=0)
            weights = tl.exp(peaks - tl.where(peak == -float("inf"), 0.0, peak))
            right = tl.max((tops != tops).to(tl.int32), axis=0) == 0
            if right & (tl.log(tl.sum(totals * weights, axis=0)) + peak > tl.max(tops, axis=0)):
                nothing = tl.full((PIECE,), -float("inf"), y_ptr.dtype.element_ty)
                for start in range(0, first, PIECE):
                    at = start + tl.arange(0, PIECE)
                    tl.store(y_ptr + at, nothing, mask=at < first)


def timestamp_rule(scores, begun, suppressed=None, counters=None, *, first, end, initial=None, by_sum=True):
    """Same arguments and result as the reference."""
    (rows, n), device = scores.shape, scores.device
    pieces, stats = cdiv(n, PIECE), None
    y = torch.empty((rows, n), device=device, dtype=scores.dtype)
    if by_sum:
        stats = torch.empty(rows * pieces * 3, device=device, dtype=torch.float32)
        counters = torch.zeros(rows, device=device, dtype=torch.int32) if counters is None else counters
    launch(
        timestamp_rule_kernel, (pieces, rows), scores, begun, suppressed, stats, counters if by_sum else None, y,
        scores.stride(0), begun.stride(0), begun.stride(1), n, begun.shape[1], first, end, initial, pieces, PIECE=PIECE,
        PIECES=power_of_two(pieces), num_warps=8, **programmatic(device),
    )  # fmt: skip
    return y
