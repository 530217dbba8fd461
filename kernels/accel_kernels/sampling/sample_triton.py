"""One token a row: programs share a row's vocabulary, read it once, and draw the token by their sums.

A row is cut into pieces of one size, and sums are taken by piece. So a row gives the same token and log probability
whatever other rows are in the call; only how many pieces a program takes depends on them.

Each piece leaves its largest logit and the sum of its weights. One uniform number chooses a piece by these, and a place
among the weights of that piece, which is read again. Without filters the last program of a row draws, in the same
launch. With filters a second launch does, as it needs many registers.

Rows with top-k: see top_k_triton.py. Rows with top-p or min-p alone: see nucleus_triton.py, launched between the two.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import multiprocessors
from accel_kernels.sampling.draw_triton import (
    GROUP,
    LINES,
    NOWHERE,
    PIECE,
    Logits,
    base_of,
    draw_from,
    first_beyond,
    logits_at,
    penalized,
    places_of,
    row_sums,
    scale_of,
    uniform_of,
    weight_of,
)
from accel_kernels.sampling.nucleus_triton import BUCKETS, is_nucleus, kept_masses, kept_of, narrow_kernel
from accel_kernels.sampling.table import seen_words
from accel_kernels.sampling.top_k_triton import draw_top_k
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

WARPS, FINISH_WARPS = 4, 8
FILL = 4  # programs to a multiprocessor, where there are so many pieces: as many as run at once
SHIFTS = {torch.bfloat16: 16, torch.float16: 13}  # bits of fp32 that the logits' type does not have
TURNS = {16: 4, 13: 5, 0: 8}  # by the shift: each finds four bits of those left


@triton.jit
def draw_any(
    logits, uniform, tops, top, scale, certain, masses, stay, edge, min_p, NUCLEUS: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """The place drawn, of pieces of these masses. certain: the first of the largest is taken. stay, edge, min_p: as in
    nucleus_triton.py."""
    p_idx = tl.arange(0, PIECES)
    masses = masses.to(tl.float64)
    piece, rest = first_beyond(masses, uniform * tl.sum(masses, axis=0), PIECES)
    piece = tl.where(certain, tl.min(tl.where(tops == top, p_idx, PIECES), axis=0), piece)
    place = places_of(piece)
    x = logits_at(logits, place, place < logits.vocabulary)
    weights = weight_of(x, base_of(top), scale)
    if NUCLEUS:
        keep = kept_of(x, weights, top, edge, tl.sum(tl.where(p_idx == piece, stay, 0.0), axis=0), min_p)
        weights = tl.where(keep, weights, 0.0)
    line, column = draw_from(weights, rest)
    first = tl.min(tl.where(x == top, place, NOWHERE))
    return tl.where(certain, first, piece * PIECE + line * GROUP + column)


@triton.jit
def finish_row(
    logits, ids_ptr, logprobs_ptr, stats_ptr, groups_ptr, list_ptr, bracket_ptr, sums_ptr, pieces,
    SHIFT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Puts the pieces of one row together; pointers are those of the row, but for the table's. groups_ptr: None where
    no filter is looked at; bracket_ptr: None where top-p and min-p are looked at beside top-k only."""
    table, row = logits.table, logits.row
    temperature = tl.load(table.temperature + row)
    seed, drawn = tl.load(table.seeds + row), tl.load(table.drawn + row)
    scale, uniform = scale_of(temperature), uniform_of(seed, drawn)
    tops, top, masses = row_sums(stats_ptr, pieces, scale, PIECES)
    total = tl.sum(masses.to(tl.float64), axis=0)
    chosen, kept = tl.full((), -1, tl.int32), tl.where(top == float("inf"), 1.0, total).to(tl.float32)
    certain, few = (temperature <= 0.0) | (top == float("inf")), False
    if groups_ptr is not None:
        few = (tl.load(table.top_k + row) > 0) & (certain == 0)
    if (top > -float("inf")) & (total == total):
        if groups_ptr is not None and few:
            chosen, kept = draw_top_k(logits, uniform, top, scale, groups_ptr, list_ptr, pieces * LINES, PIECES * LINES)
        else:
            stay, edge, min_p = tl.zeros((PIECES,), tl.float32), -float("inf"), 0.0
            if bracket_ptr is not None:
                if is_nucleus(table, row, temperature) & (certain == 0):
                    masses, stay, edge = kept_masses(
                        table, row, base_of(top), top, scale, tl.load(table.top_p + row) * total, bracket_ptr, sums_ptr,
                        pieces, SHIFT, PIECES,
                    )  # fmt: skip
                    kept, min_p = tl.sum(masses, axis=0), tl.load(table.min_p + row)
            chosen = draw_any(
                logits, uniform, tops, top, scale, certain, masses, stay, edge, min_p, bracket_ptr is not None, PIECES
            )
    tl.store(ids_ptr, chosen.to(tl.int64))
    if logprobs_ptr is not None:
        x = logits_at(logits, chosen, chosen >= 0)
        below = (x - top) / tl.where(temperature > 0, temperature, 1.0)
        logprob = tl.where(x == top, 0.0, below) - tl.log(kept)
        tl.store(logprobs_ptr, tl.where(chosen < 0, float("nan"), logprob))
    if chosen >= 0:
        tl.store(table.drawn + row, drawn + 1)
        if table.seen is not None:
            word_ptr = table.seen + row * logits.words + chosen // 32
            tl.store(word_ptr, tl.load(word_ptr) | (1 << (chosen % 32)))


@triton.jit(do_not_specialize=("splits",))
def pieces_kernel(
    logits_ptr, table, rows_ptr, ids_ptr, logprobs_ptr, stats_ptr, groups_ptr, stride, vocabulary, pieces, words,
    splits, PIECES: tl.constexpr,
):  # fmt: skip
    """splits: programs to a row. logprobs_ptr: None where they are not asked for. groups_ptr: None without filters."""
    i = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    row = tl.load(rows_ptr + i).to(tl.int64)
    logits_ptr += i * stride
    logits = Logits(logits_ptr, table, row, vocabulary, words)
    if row >= 0:
        temperature = tl.load(table.temperature + row)
        scale = scale_of(temperature)
        few = False
        if groups_ptr is not None:
            few = (tl.load(table.top_k + row) > 0) & (temperature > 0)
        first, last = pieces * split // splits, pieces * (split + 1) // splits
        place = places_of(first)
        following = tl.load(logits_ptr + place, mask=place < vocabulary, other=-float("inf"))
        for piece in range(first, last):
            here = following.to(tl.float32)
            place = places_of(piece + 1)  # on its way while this piece is summed
            mask = (place < vocabulary) & (place < last * PIECE)
            following = tl.load(logits_ptr + place, mask=mask, other=-float("inf"))
            place = places_of(piece)
            x = penalized(here, logits, place, place < vocabulary)
            top = tl.max(x)
            stat_ptr = stats_ptr + (i * pieces + piece) * 2
            tl.store(stat_ptr, top)
            tl.store(stat_ptr + 1, tl.sum(weight_of(x, base_of(top), scale)))
            if groups_ptr is not None and few:
                g_idx = (i * pieces + piece) * LINES + tl.arange(0, LINES)
                tl.store(groups_ptr + g_idx, tl.max(x, axis=1))
        if groups_ptr is None:
            tl.debug_barrier()
            if tl.atomic_add(table.split_counters + row, 1, sem="acq_rel") == splits - 1:
                tl.atomic_xchg(table.split_counters + row, 0)
                finish_row(
                    logits, ids_ptr + i, None if logprobs_ptr is None else logprobs_ptr + i, stats_ptr + i * pieces * 2,
                    None, None, None, None, pieces, 0, PIECES,
                )  # fmt: skip
    elif split == 0:
        tl.store(ids_ptr + i, -1)
        if logprobs_ptr is not None:
            tl.store(logprobs_ptr + i, float("nan"))


@triton.jit
def finish_kernel(
    logits_ptr, table, rows_ptr, ids_ptr, logprobs_ptr, stats_ptr, groups_ptr, list_ptr, bracket_ptr, sums_ptr, stride,
    vocabulary, pieces, words, SHIFT: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A program a row."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row >= 0:
        groups = i * pieces * LINES
        finish_row(
            Logits(logits_ptr + i * stride, table, row, vocabulary, words), ids_ptr + i,
            None if logprobs_ptr is None else logprobs_ptr + i, stats_ptr + i * pieces * 2, groups_ptr + groups,
            list_ptr + groups, None if bracket_ptr is None else bracket_ptr + i * 2,
            None if sums_ptr is None else sums_ptr + i * pieces * BUCKETS, pieces, SHIFT, PIECES,
        )  # fmt: skip


def sample(logits, table, rows, *, filters, nucleus=True, logprobs=False):
    """Same arguments and result as the reference."""
    n, vocabulary = logits.shape
    pieces, words = cdiv(vocabulary, PIECE.value), seen_words(vocabulary)
    splits = min(pieces, max(1, FILL * multiprocessors(logits.device) // n))
    sizes, most = (logits.stride(0), vocabulary, pieces, words), power_of_two(pieces)

    def room(*shape, dtype=torch.float32):
        return torch.empty(shape, device=logits.device, dtype=dtype)

    ids, found, stats = room(n, dtype=torch.int64), room(n) if logprobs else None, room(n, pieces, 2)
    largest = room(n, pieces, LINES.value) if filters else None
    launch(
        pieces_kernel, (n * splits,), logits, table, rows, ids, found, stats, largest, *sizes, splits, most,
        num_warps=WARPS,
    )  # fmt: skip
    if not filters:
        return (ids, found) if logprobs else ids
    shift, bracket, sums = 0, None, None
    if nucleus:
        shift = 0 if table.seen is not None else SHIFTS.get(logits.dtype, 0)
        for left in reversed(range(TURNS[shift] + 1)):
            given, given_sums = bracket, sums
            bracket, sums = room(n, 2, dtype=torch.int64), room(n, pieces, BUCKETS.value)
            launch(
                narrow_kernel, (n * splits,), logits, table, rows, stats, given, given_sums, bracket, sums, *sizes,
                splits, left == 0, shift, most, num_warps=WARPS,
            )  # fmt: skip
    listed = room(n, pieces, LINES.value, dtype=torch.int32)
    launch(
        finish_kernel, (n,), logits, table, rows, ids, found, stats, largest, listed, bracket, sums, *sizes, shift,
        most, num_warps=FINISH_WARPS,
    )  # fmt: skip
    return (ids, found) if logprobs else ids
