"""A step of beam search in two launches: the likeliest words of each piece of a row, then all of a text at once.

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
def divided(x, factor, DIVIDE: tl.constexpr):
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
    keys_ptr, sums_ptr, ints_ptr, floats_ptr, bounds_ptr, factors_ptr, y_ptr, scores_ptr, token_ptr, order_ptr,
    over_ptr, pieces, words, ends, room, texts, BEAMS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
    DIVIDE: tl.constexpr, B: tl.constexpr, K: tl.constexpr, M: tl.constexpr, PIECES: tl.constexpr,
    COLUMNS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a text. B, K, M: powers of two, of beams, of what is kept, and of both together; ROOM: of a tile."""
    text = tl.program_id(0)
    rows = texts * BEAMS
    whole = rows.to(tl.int64) * room
    b, k, m = tl.arange(0, B), tl.arange(0, K), tl.arange(0, M)
    flags = 4 * whole
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(ints_ptr + flags + rows + texts)
    given, most = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    at_end, at_best = tl.load(factors_ptr + length), tl.load(factors_ptr + room + length)

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
        over = over | (kept & (token == tl.load(bounds_ptr + 2 + number)))

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
    tl.store(token_ptr + into, new, mask=beams)
    tl.store(order_ptr + into, source, mask=beams)
    tl.store(scores_ptr + into, running, mask=beams)

    # those that have ended
    hopeful = tl.load(ints_ptr + flags + rows + text) != 0
    full = tl.min(tl.load(ints_ptr + flags + row, mask=beams, other=1), axis=0) != 0
    score = divided(found, at_end, DIVIDE)
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
    better = beams & (divided(first, at_best, DIVIDE) > worst)
    hopeful = hopeful & (tl.max(better.to(tl.int32), axis=0) != 0)
    tl.store(y_ptr + flags + rows + text, hopeful.to(tl.int64))
    all_ended = tl.min(tl.where(beams, ended, 1), axis=0) != 0
    tl.store(over_ptr + 3 * text, hopeful == 0)
    tl.store(over_ptr + 3 * text + 1, all_ended if EARLY else False)
    tl.store(over_ptr + 3 * text + 2, tl.min(tl.where(kept, over.to(tl.int32), 1), axis=0) != 0)
    if text == 0:
        tl.store(y_ptr + flags + rows + texts, length + 1)


def beam_step(logits, ints, floats, bounds, factors, *, rules, normalized=False):
    """Same arguments and result as the reference."""
    (rows, words), device, pdl = logits.shape, logits.device, programmatic(logits.device)
    texts, beams, keep, room, early = rules
    pieces = cdiv(words, PIECE)
    keys = torch.empty((rows, pieces, keep), device=device, dtype=torch.int64)
    sums = None if normalized else torch.empty((rows, pieces, 2), device=device, dtype=torch.float32)
    launch(
        likeliest_kernel, (pieces, rows), logits, keys, sums, logits.stride(0), words, keep, PIECE, num_warps=8, **pdl
    )
    y, scores = torch.empty_like(ints), torch.empty_like(floats)
    token = torch.empty((rows, 1), device=device, dtype=torch.int64)
    order = torch.empty(rows, device=device, dtype=torch.int64)
    b, columns = power_of_two(beams), power_of_two(pieces * keep)
    over = torch.empty((texts, 3), device=device, dtype=torch.bool)
    launch(
        grow_kernel, (texts,), keys, sums, ints, floats, bounds, factors, y, scores, token, order, over, pieces, words,
        len(bounds) - 2, room, texts, BEAMS=beams, KEEP=keep, EARLY=early, DIVIDE=not logits.is_cuda,
        B=b, K=power_of_two(keep), M=power_of_two(beams + keep), PIECES=power_of_two(pieces),
        COLUMNS=columns, ROOM=64, num_warps=8 if b * columns > 2048 else 4, **pdl,
    )  # fmt: skip
    return y, scores, token, order, over.all(0).any()
