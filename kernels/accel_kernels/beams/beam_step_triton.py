"""A step of beam search in three launches: the likeliest words of each piece of a row, a text each, and what is one.

Numbers are compared as integers with their places below them, see `in_order`: of equals the first place wins.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.beams.beam_step import NEVER as LEAST
from accel_kernels.device import programmatic
from accel_kernels.float_order_triton import NEVER, from_order, in_order
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

PIECE = 4096  # words to a program
LEAST = tl.constexpr(LEAST)


@triton.jit
def likeliest_kernel(
    logits_ptr, keys_ptr, sums_ptr, stride, words, KEEP: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """keys: (rows, pieces, KEEP), of the largest; sums: (rows, pieces, 2), the largest and the sum of exponentials."""
    row, piece = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits_ptr + row * stride + at, mask=at < words, other=-float("inf")).to(tl.float32)
    into = row * tl.num_programs(0) + piece
    if sums_ptr is not None:
        top = tl.max(x, axis=0)
        tl.store(sums_ptr + 2 * into, top)
        tl.store(sums_ptr + 2 * into + 1, tl.sum(tl.where(x == -float("inf"), 0.0, tl.exp(x - top)), axis=0))
    keys = tl.where(at < words, in_order(x, at), NEVER)
    for number in range(KEEP):
        best = tl.max(keys, axis=0)
        tl.store(keys_ptr + into * KEEP + number, best)
        keys = tl.where(keys == best, NEVER, keys)


@triton.jit
def by_reciprocal(x, factor, DIVIDE: tl.constexpr):
    return x / factor if DIVIDE else x * factor


@triton.jit
def picked(values, at, places):
    """values at `places`. at: of the values."""
    return tl.sum(tl.where(places[:, None] == at[None, :], values[None, :], tl.zeros_like(values)[None, :]), axis=1)


@triton.jit
def largest(keys, NUMBER: tl.constexpr, SIZE: tl.constexpr):
    """The largest numbers and their places, (SIZE,), of keys as of `in_order`, (rows, columns)."""
    at = tl.arange(0, SIZE)
    found, places = tl.full((SIZE,), 0, tl.float32), tl.full((SIZE,), 0, tl.int32)
    for number in range(NUMBER):
        best = tl.max(tl.max(keys, axis=1), axis=0)
        found = tl.where(at == number, from_order((best >> 32).to(tl.int32)), found)
        places = tl.where(at == number, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), places)
        keys = tl.where(keys == best, NEVER, keys)
    return found, places


@triton.jit
def copy_rows(to_ptr, from_ptr, grown, changed, new, inside, room, ROOM: tl.constexpr):
    """Rows of tokens from pointers (BEAMS,), with a new one at `changed` of those that have grown."""
    for first in range(0, room, ROOM):
        at = first + tl.arange(0, ROOM)
        mask = inside[:, None] & (at < room)[None, :]
        x = tl.load(from_ptr[:, None] + at[None, :], mask=mask)
        x = tl.where(grown[:, None] & (at == changed)[None, :], new[:, None], x)
        tl.store(to_ptr[:, None] + at[None, :], x, mask=mask)


@triton.jit(do_not_specialize=("pieces", "words", "ends", "room", "texts"))
def grow_kernel(
    keys_ptr, sums_ptr, ints_ptr, floats_ptr, y_ptr, scores_ptr, over_ptr, pieces, words, ends, room, texts,
    BEAMS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr, DIVIDE: tl.constexpr, B: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, ROOM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program a text. ints_ptr, floats_ptr: both parts of what `BeamTexts.packed` gives; y_ptr, scores_ptr: of what
    comes behind. over_ptr: (texts, 3) int8, whether a text cannot become better, has ended, and cannot go on.

    B, K, M: powers of two, of beams, of what is kept, and of both together; ROOM: of a tile.
    """
    text = tl.program_id(0)
    rows = texts * BEAMS
    whole = rows.to(tl.int64) * room
    b, k, m = tl.arange(0, B), tl.arange(0, K), tl.arange(0, M)
    flags = 4 * whole
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    numbers = flags + rows + texts  # the place of `length`
    bounds = numbers + 2 + 2 * rows
    length = tl.load(ints_ptr + numbers)
    given, most = tl.load(ints_ptr + bounds), tl.load(ints_ptr + bounds + 1)
    factors = floats_ptr + 2 * rows + length
    at_end, at_best = tl.load(factors), tl.load(factors + room)

    # the likeliest continuations
    column = tl.arange(0, COLUMNS)
    row = text * BEAMS + b
    mask = (b < BEAMS)[:, None] & (column < pieces * KEEP)[None, :]
    keys = tl.load(keys_ptr + row[:, None] * (pieces * KEEP) + column[None, :], mask=mask, other=NEVER)
    x = from_order((keys >> 32).to(tl.int32))
    if sums_ptr is not None:
        piece = tl.arange(0, PIECES)
        there = (b < BEAMS)[:, None] & (piece < pieces)[None, :]
        sums = sums_ptr + 2 * (row[:, None] * pieces + piece[None, :])
        tops = tl.load(sums, mask=there, other=-float("inf"))
        parts = tl.load(sums + 1, mask=there, other=0.0)
        top = tl.where(b < BEAMS, tl.max(tops, axis=1), 0.0)
        total = tl.sum(tl.where(parts == 0.0, 0.0, parts * tl.exp(tops - top[:, None])), axis=1)
        x = x - top[:, None] - tl.log(tl.where(b < BEAMS, total, 1.0))[:, None]
    x += tl.load(floats_ptr + row, mask=b < BEAMS, other=0.0)[:, None]
    place = b[:, None] * words + 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)
    found, places = largest(tl.where(keys != NEVER, in_order(x, place), NEVER), KEEP, K)
    kept, origin, token = k < KEEP, places // words, (places % words).to(tl.int64)
    over = kept & (length + 1 >= most)
    for number in range(ends):
        over = over | (kept & (token == tl.load(ints_ptr + bounds + 2 + number)))

    # those that go on
    open_ = tl.where(over, found + LEAST, found)
    running, best = largest(tl.where(kept, in_order(open_, k), NEVER)[None, :], BEAMS, B)
    mine, beams = picked(origin, k, best), b < BEAMS
    new = picked(token, k, best)
    source, into = (text * BEAMS + mine).to(tl.int64), (text * BEAMS + b).to(tl.int64)
    copy_rows(y_ptr + into * room, ints_ptr + source * room, beams, length, new, beams, room, ROOM)
    copy_rows(
        y_ptr + whole + into * room, ints_ptr + whole + source * room, beams, length - given, source, beams, room, ROOM
    )
    tl.store(y_ptr + numbers + 1 + into, new, mask=beams)
    tl.store(y_ptr + numbers + 1 + rows + into, source, mask=beams)
    tl.store(scores_ptr + into, running, mask=beams)

    # those that have ended
    hopeful = tl.load(ints_ptr + flags + rows + text) != 0
    full = tl.min(tl.load(ints_ptr + flags + row, mask=beams, other=1), axis=0) != 0
    score = by_reciprocal(found, at_end, DIVIDE)
    if EARLY:
        score = tl.where(full, score + LEAST, score)
    score = tl.where(hopeful, score, score + LEAST)
    now = over & (k < BEAMS)
    score = tl.where(now, score, score + LEAST)
    before = m < BEAMS
    old = text * BEAMS + m
    merged = tl.where(before, tl.load(floats_ptr + rows + old, mask=before, other=0.0), picked(score, k, m - BEAMS))
    ended = tl.where(
        before, tl.load(ints_ptr + flags + old, mask=before, other=0) != 0, picked(now.to(tl.int32), k, m - BEAMS) != 0
    )
    scores, chosen = largest(tl.where(m < BEAMS + KEEP, in_order(merged, m), NEVER)[None, :], BEAMS, B)
    ended = picked(ended.to(tl.int32), m, chosen)
    grown = chosen >= BEAMS
    mine = picked(origin, k, chosen - BEAMS)
    new = picked(token, k, chosen - BEAMS)
    source = (text * BEAMS + tl.where(grown, mine, chosen)).to(tl.int64)
    other = tl.where(grown, 0, 2 * whole)
    copy_rows(y_ptr + 2 * whole + into * room, ints_ptr + other + source * room, grown, length, new, beams, room, ROOM)
    copy_rows(
        y_ptr + 3 * whole + into * room, ints_ptr + whole + other + source * room, grown, length - given, source, beams,
        room, ROOM,
    )  # fmt: skip
    tl.store(y_ptr + flags + into, ended.to(tl.int64), mask=beams)
    tl.store(scores_ptr + rows + into, scores, mask=beams)

    # whether the text goes on
    worst = tl.where(ended != 0, tl.min(tl.where(beams, scores, float("inf")), axis=0), LEAST)
    first = tl.sum(tl.where(b == 0, running, 0.0), axis=0)
    better = beams & (by_reciprocal(first, at_best, DIVIDE) > worst)
    hopeful = hopeful & (tl.max(better.to(tl.int32), axis=0) != 0)
    tl.store(y_ptr + flags + rows + text, hopeful.to(tl.int64))
    all_ended = tl.min(tl.where(beams, ended, 1), axis=0) != 0
    tl.store(over_ptr + 3 * text, (hopeful == 0).to(tl.int8))
    tl.store(over_ptr + 3 * text + 1, (all_ended & EARLY).to(tl.int8))
    tl.store(over_ptr + 3 * text + 2, tl.min(tl.where(kept, over.to(tl.int32), 1), axis=0).to(tl.int8))


@triton.jit(do_not_specialize=("texts", "rows", "whole", "ends", "room"))
def ending_kernel(
    ints_ptr, floats_ptr, y_ptr, scores_ptr, over_ptr, texts, rows, whole, ends, room, T: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What is one for all texts: their length, whether they are over, and what does not change."""
    text, kind, at = tl.arange(0, T), tl.arange(0, 4), tl.arange(0, SIZE)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    known = (text < texts)[:, None] & (kind < 3)[None, :]
    flags = tl.load(over_ptr + 3 * text[:, None] + kind[None, :], mask=known, other=1).to(tl.int32)
    over = tl.max(tl.where(kind < 3, tl.min(flags, axis=0), 0), axis=0)
    numbers = 4 * whole + rows + texts
    tl.store(y_ptr + numbers, tl.load(ints_ptr + numbers) + 1)
    tl.store(y_ptr + numbers + 1 + 2 * rows, over.to(tl.int64))
    bounds, factors = numbers + 2 + 2 * rows, 2 * rows
    for first in range(0, 2 + ends, SIZE):
        mask = first + at < 2 + ends
        tl.store(y_ptr + bounds + first + at, tl.load(ints_ptr + bounds + first + at, mask=mask), mask=mask)
    for first in range(0, 2 * room, SIZE):
        mask = first + at < 2 * room
        tl.store(scores_ptr + factors + first + at, tl.load(floats_ptr + factors + first + at, mask=mask), mask=mask)


def beam_step(logits, packed, *, rules, normalized=False):
    """Same arguments and result as the reference."""
    (rows, words), device, pdl = logits.shape, logits.device, programmatic(logits.device)
    texts, beams, keep, room, ends, early, _ = rules
    pieces = cdiv(words, PIECE)
    keys = torch.empty((rows, pieces, keep), device=device, dtype=torch.int64)
    sums = None if normalized else torch.empty((rows, pieces, 2), device=device, dtype=torch.float32)
    launch(
        likeliest_kernel, (pieces, rows), logits, keys, sums, logits.stride(0), words, keep, PIECE, num_warps=8, **pdl
    )
    y, b, columns = torch.empty_like(packed), power_of_two(beams), power_of_two(pieces * keep)
    before, after = (one[-(rows + room) :].view(torch.float32) for one in (packed, y))
    over = torch.empty((texts, 3), device=device, dtype=torch.int8)
    launch(
        grow_kernel, (texts,), keys, sums, packed, before, y, after, over, pieces, words, ends, room, texts,
        BEAMS=beams, KEEP=keep, EARLY=early, DIVIDE=not logits.is_cuda, B=b, K=power_of_two(keep),
        M=power_of_two(beams + keep), PIECES=power_of_two(pieces), COLUMNS=columns, ROOM=64,
        num_warps=8 if b * columns > 2048 else 4, **pdl,
    )  # fmt: skip
    launch(
        ending_kernel, (1,), packed, before, y, after, over, texts, rows, rows * room, ends, room,
        T=power_of_two(texts), SIZE=512, num_warps=4, **pdl,
    )  # fmt: skip
    return y
