"""One token a row: programs share a row's vocabulary, read it once, and the row's best places are put together.

A row is cut into pieces of one size whatever the number of rows, and sums are taken by piece, so that a row gives the
same token and the same log probability in any company. How many pieces a program takes depends on the rows: few rows
are spread over the GPU, many take fewer and longer programs.

Without filters it is one launch: a piece leaves its largest score, noise included, and the last program of a row, by a
count, takes the largest of these. With filters a second, small launch has a program a row. A piece then leaves the
largest score of each GROUP of places. The k-th largest of these is no larger than the k-th largest score, so only the
groups that reach it, about k of them, can hold what top-k keeps; top-p is bounded in the same way by their weights. See
filters_triton.py for the rest. That kernel keeps a row's candidates in its registers and so needs many of them, which
would leave room for one program to a multiprocessor if it were a part of the first.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.launch import power_of_two
from accel_kernels.op import multiprocessors
from accel_kernels.sampling.filters_triton import draw_filtered, score_at, weight_of
from accel_kernels.sampling.noise_triton import noise_from
from accel_kernels.sampling.table import seen_words
from accel_kernels.warmup import launch

PIECE, WARPS = 4096, 8
GROUP = 32
FILL = 8  # programs to a multiprocessor, where there are so many pieces: four run at once
STATS = 3  # of a piece: the largest score, the sum of weights beside it, the largest score with noise
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def is_filtered(table, row, temperature):
    some = (tl.load(table.top_k + row) > 0) | (tl.load(table.top_p + row) < 1.0) | (tl.load(table.min_p + row) > 0.0)
    return some & (temperature > 0)


@triton.jit
def finish_row(
    logits_ptr, table, row, ids_ptr, logprobs_ptr, stats_ptr, places_ptr, groups_ptr, list_ptr, vocabulary, pieces,
    words, FILTERS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """Puts the pieces of one row together; pointers are those of the row, but for the table's."""
    temperature = tl.load(table.temperature + row)
    seed, drawn = tl.load(table.seeds + row), tl.load(table.drawn + row)
    filtered = False
    if FILTERS:
        filtered = is_filtered(table, row, temperature)
    p_idx = tl.arange(0, PIECES)
    there = p_idx < pieces
    tops = tl.load(stats_ptr + p_idx * STATS, mask=there, other=-float("inf"), cache_modifier=".cg")
    top = tl.max(tl.where(tops == tops, tops, -float("inf")), axis=0)
    broken = tl.max((tops != tops).to(tl.int32), axis=0) > 0
    chosen, total = tl.full((), -1, tl.int32), tl.full((), 1.0, tl.float32)
    if (top > -float("inf")) & (broken == 0):
        if logprobs_ptr is not None or (FILTERS and filtered):
            sums = tl.load(stats_ptr + p_idx * STATS + 1, mask=there, other=0.0, cache_modifier=".cg")
            total = tl.sum(sums * weight_of(tops, top), axis=0)
        if FILTERS and filtered:
            chosen, total = draw_filtered(
                logits_ptr, table, row, temperature, words, vocabulary, seed, drawn, top, total, groups_ptr, list_ptr,
                pieces * (PIECE // GROUP), GROUPS, GROUP, PIECE // GROUP,
            )  # fmt: skip
        else:
            values = tl.load(stats_ptr + p_idx * STATS + 2, mask=there, other=-float("inf"), cache_modifier=".cg")
            places = tl.load(places_ptr + p_idx, mask=there, other=NOWHERE, cache_modifier=".cg")
            chosen = tl.min(tl.where(values == tl.max(values, axis=0), places, NOWHERE), axis=0)
    tl.store(ids_ptr, chosen.to(tl.int64))
    if logprobs_ptr is not None:
        score = score_at(logits_ptr, table, row, temperature, words, chosen, chosen >= 0)
        logprob = tl.where(score == top, 0.0, score - top) - tl.log(total)
        tl.store(logprobs_ptr, tl.where(chosen < 0, float("nan"), logprob))
    if chosen >= 0:
        tl.store(table.drawn + row, drawn + 1)
        if table.seen is not None:
            word_ptr = table.seen + row * words + chosen // 32
            tl.store(word_ptr, tl.load(word_ptr) | (1 << (chosen % 32)))


@triton.jit(do_not_specialize=("splits",))
def pieces_kernel(
    logits_ptr, table, rows_ptr, ids_ptr, logprobs_ptr, stats_ptr, places_ptr, groups_ptr, stride, vocabulary, pieces,
    words, splits, FILTERS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """splits: programs to a row. logprobs_ptr: None where they are not asked for. groups_ptr: None without FILTERS."""
    i = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row >= 0:
        temperature = tl.load(table.temperature + row)
        seed, drawn = tl.load(table.seeds + row), tl.load(table.drawn + row)
        filtered = False
        if FILTERS:
            filtered = is_filtered(table, row, temperature)
        for piece in range(pieces * split // splits, pieces * (split + 1) // splits):
            place = piece * PIECE + tl.arange(0, PIECE)
            x = score_at(logits_ptr + i * stride, table, row, temperature, words, place, place < vocabulary)
            top = tl.max(tl.where(x == x, x, -float("inf")), axis=0)
            broken = tl.max((x != x).to(tl.int32), axis=0) > 0
            stat_ptr = stats_ptr + (i * pieces + piece) * STATS
            tl.store(stat_ptr, tl.where(broken, float("nan"), top))
            if logprobs_ptr is not None or (FILTERS and filtered):
                tl.store(stat_ptr + 1, tl.sum(weight_of(x, top), axis=0))
            if FILTERS and filtered:
                g_idx = (i * pieces + piece) * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
                tl.store(groups_ptr + g_idx, tl.max(tl.reshape(x, (PIECE // GROUP, GROUP)), axis=1))
            else:
                if temperature > 0:
                    x += noise_from(seed, drawn, piece * PIECE, PIECE)
                best = tl.max(x, axis=0)
                tl.store(stat_ptr + 2, best)
                tl.store(places_ptr + i * pieces + piece, tl.min(tl.where(x == best, place, NOWHERE), axis=0))
        if not FILTERS:
            tl.debug_barrier()
            if tl.atomic_add(table.tickets + row, 1, sem="acq_rel") == splits - 1:
                tl.atomic_xchg(table.tickets + row, 0)
                finish_row(
                    logits_ptr + i * stride, table, row, ids_ptr + i,
                    None if logprobs_ptr is None else logprobs_ptr + i, stats_ptr + i * pieces * STATS,
                    places_ptr + i * pieces, None, None, vocabulary, pieces, words, False, PIECE, PIECES, GROUP, 1,
                    STATS,
                )  # fmt: skip
    elif split == 0:
        tl.store(ids_ptr + i, -1)
        if logprobs_ptr is not None:
            tl.store(logprobs_ptr + i, float("nan"))


@triton.jit
def filtered_kernel(
    logits_ptr, table, rows_ptr, ids_ptr, logprobs_ptr, stats_ptr, places_ptr, groups_ptr, list_ptr, stride, vocabulary,
    pieces, words, PIECE: tl.constexpr, PIECES: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """A program a row."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    if row >= 0:
        groups = i * pieces * (PIECE // GROUP)
        finish_row(
            logits_ptr + i * stride, table, row, ids_ptr + i, None if logprobs_ptr is None else logprobs_ptr + i,
            stats_ptr + i * pieces * STATS, places_ptr + i * pieces, groups_ptr + groups, list_ptr + groups, vocabulary,
            pieces, words, True, PIECE, PIECES, GROUP, GROUPS, STATS,
        )  # fmt: skip


def sample(logits, table, rows, *, filters, logprobs=False):
    """Same arguments and result as the reference."""
    n, vocabulary = logits.shape
    pieces, words = -(-vocabulary // PIECE), seen_words(vocabulary)
    splits = min(pieces, max(1, FILL * multiprocessors(logits.device) // n))
    groups = pieces * (PIECE // GROUP)

    def room(size, dtype):
        return torch.empty(size, device=logits.device, dtype=dtype)

    ids = room(n, torch.int64)
    found = room(n, torch.float32) if logprobs else None
    stats, places = room(n * pieces * STATS, torch.float32), room(n * pieces, torch.int32)
    largest = room(n * groups, torch.float32) if filters else None
    launch(
        pieces_kernel, (n * splits,),
        logits, table, rows, ids, found, stats, places, largest, logits.stride(0), vocabulary, pieces, words, splits,
        filters, PIECE, power_of_two(pieces), GROUP, STATS, num_warps=WARPS,
    )  # fmt: skip
    if filters:
        launch(
            filtered_kernel, (n,),
            logits, table, rows, ids, found, stats, places, largest, room(n * groups, torch.int32), logits.stride(0),
            vocabulary, pieces, words, PIECE, power_of_two(pieces), GROUP, power_of_two(groups), STATS, num_warps=WARPS,
        )  # fmt: skip
    return (ids, found) if logprobs else ids
