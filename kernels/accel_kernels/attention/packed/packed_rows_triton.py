"""Packed rows in two launches: what each sequence is like; then each sequence's rows, of what all are like.

Neither depends on the number of sequences or their length, so each is compiled once.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.packed.packed_rows import ALL, NONE, ONE, PackedRows
from accel_kernels.sizes import cdiv
from accel_kernels.warmup import launch

PART = 64  # rows of a sequence that a program of the first launch compares
ORDERED, MIRRORED = tl.constexpr(1), tl.constexpr(2)  # of a sequence's flags
WHOLE = tl.constexpr(ALL)
SINGLE = tl.constexpr(ONE)
NOTHING = tl.constexpr(NONE)


@triton.jit(do_not_specialize=("length", "channels", "batch_step", "row_step", "parts"))
def sequence_facts_kernel(
    mask_ptr, x_ptr, counts_ptr, flags_ptr, unlike_ptr, length, channels, batch_step, row_step, parts,
    PART: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program a sequence and a part of its rows, PART of them. unlike_ptr: (parts, B), rows of padding that differ
    from the sequence's first.
    """
    sequence, part = tl.program_id(0), tl.program_id(1)
    mask_ptr += sequence.to(tl.int64) * length
    count, rises, falls, first = 0, 0, 0, length
    for at in range(0, length, BLOCK):
        j = at + tl.arange(0, BLOCK)
        here, inside = j < length, j + 1 < length
        mine = tl.load(mask_ptr + j, mask=here, other=0).to(tl.int32)
        after = tl.load(mask_ptr + j + 1, mask=inside, other=0).to(tl.int32)
        count += tl.sum(mine, axis=0)
        rises += tl.sum((inside & (after > mine)).to(tl.int32), axis=0)
        falls += tl.sum((inside & (after < mine)).to(tl.int32), axis=0)
        first = tl.minimum(first, tl.min(tl.where(here & (mine == 0), j, length), axis=0))
    unlike = 0
    if x_ptr is not None:
        x_ptr += sequence.to(tl.int64) * batch_step
        one_ptr = x_ptr + tl.minimum(first, length - 1).to(tl.int64) * row_step
        for step in range(0, PART, ROWS):
            row = part * PART + step + tl.arange(0, ROWS)
            padding = tl.load(mask_ptr + row, mask=row < length, other=1) == 0
            for column in range(0, channels, COLUMNS):
                c = column + tl.arange(0, COLUMNS)
                there = padding[:, None] & (c < channels)[None, :]
                one = tl.load(one_ptr + c, mask=c < channels, other=0.0)
                given = tl.load(x_ptr + row.to(tl.int64)[:, None] * row_step + c[None, :], mask=there, other=0.0)
                unlike += tl.sum(tl.sum((there & (given != one[None, :])).to(tl.int32), axis=1), axis=0)
        tl.store(unlike_ptr + part * tl.num_programs(0) + sequence, unlike)
    if part == 0:
        tl.store(counts_ptr + sequence, count)
        tl.store(flags_ptr + sequence, tl.where(rises == 0, ORDERED, 0) + tl.where(falls == 0, MIRRORED, 0))


@triton.jit
def _with_padding(count, length, computed):
    """How many rows of sequences with so many tokens are computed."""
    one = tl.minimum(count + 1, length)
    return tl.where(computed == WHOLE, length, tl.where(computed == SINGLE, one, count))


@triton.jit(do_not_specialize=("batch", "length", "size", "idle", "parts"))
def packed_rows_kernel(
    mask_ptr, plain_ptr, counts_ptr, flags_ptr, unlike_ptr, facts_ptr, starts_ptr, keys_ptr, padding_ptr, rows_ptr,
    places_ptr, unseen_ptr, batch, length, size, idle, parts,
    HIDDEN: tl.constexpr, PLACED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a sequence, and a last one for what lies behind all and for the facts."""
    sequence = tl.program_id(0)
    idx = tl.arange(0, BLOCK)
    ordered, mirrored, short, least, unlike = 1, 1, 0, length, 0
    for at in range(0, batch, BLOCK):
        here = at + idx < batch
        count = tl.load(counts_ptr + at + idx, mask=here, other=length)
        flags = tl.load(flags_ptr + at + idx, mask=here, other=ORDERED + MIRRORED)
        short += tl.sum((count < length).to(tl.int32), axis=0)
        least = tl.minimum(least, tl.min(count, axis=0))
        ordered = tl.minimum(ordered, tl.min((flags & ORDERED > 0).to(tl.int32), axis=0))
        mirrored = tl.minimum(mirrored, tl.min((flags & MIRRORED > 0).to(tl.int32), axis=0))
    if unlike_ptr is not None:
        for at in range(0, batch * parts, BLOCK):
            unlike += tl.sum(tl.load(unlike_ptr + at + idx, mask=at + idx < batch * parts, other=0), axis=0)
    alike = unlike == 0 if unlike_ptr is not None else False
    turned = (ordered == 0) if TURNS else False
    computed = tl.where(alike & (turned | (not PLACED)), SINGLE, WHOLE)
    if HIDDEN:
        none = ordered > 0
        if plain_ptr is not None:
            none = none & (tl.load(plain_ptr) != 0)
        computed = tl.where(none, NOTHING, computed)
    start, total, most = 0, 0, 0
    for at in range(0, batch, BLOCK):
        here = at + idx < batch
        one = _with_padding(tl.load(counts_ptr + at + idx, mask=here, other=0), length, computed)
        one = tl.where(here, one, 0)
        start += tl.sum(tl.where(at + idx < sequence, one, 0), axis=0)
        total += tl.sum(one, axis=0)
        most = tl.maximum(most, tl.max(one, axis=0))
    if sequence == batch:
        tl.store(facts_ptr, total.to(tl.int64))
        tl.store(facts_ptr + 1, most.to(tl.int64))
        tl.store(facts_ptr + 2, least.to(tl.int64))
        tl.store(facts_ptr + 3, short.to(tl.int64))
        tl.store(facts_ptr + 4, ordered.to(tl.int64))
        tl.store(facts_ptr + 5, mirrored.to(tl.int64))
        tl.store(facts_ptr + 6, computed.to(tl.int64))
        for at in range(0, idle + 1, BLOCK):
            tl.store(starts_ptr + batch + at + idx, total + tl.zeros((BLOCK,), tl.int32), mask=at + idx <= idle)
            tl.store(keys_ptr + batch + at + idx, tl.zeros((BLOCK,), tl.int32), mask=at + idx < idle)
            tl.store(padding_ptr + batch + at + idx, tl.zeros((BLOCK,), tl.int32), mask=at + idx < idle)
        for at in range(total, size, BLOCK):
            tl.store(rows_ptr + at + idx, tl.zeros((BLOCK,), tl.int64), mask=at + idx < size)
        return
    count = tl.load(counts_ptr + sequence)
    more = _with_padding(count, length, computed) - count
    tl.store(starts_ptr + sequence, start)
    tl.store(keys_ptr + sequence, count)
    tl.store(padding_ptr + sequence, length - count)
    first = sequence.to(tl.int64) * length
    tokens = 0  # before this block
    for at in range(0, length, BLOCK):
        j = at + idx
        here = j < length
        place = first + tl.where(turned, length - 1 - j, j)
        mine = tl.load(mask_ptr + place, mask=here, other=0).to(tl.int32)
        before = tokens + tl.cumsum(mine, axis=0) - mine
        behind = j - before  # of padding
        to = start + tl.where(mine > 0, before, count + tl.minimum(behind, more - 1))
        unseen = (mine == 0) & (more == 0)
        tl.store(places_ptr + place, tl.where(unseen, 0, to).to(tl.int64), mask=here)
        tl.store(unseen_ptr + place, unseen.to(tl.int8), mask=here)
        tl.store(rows_ptr + to, place, mask=here & ((mine > 0) | (behind < more)))
        tokens += tl.sum(mine, axis=0)


def packed_rows(mask, x=None, plain=None, *, size, idle=0, hidden=False, placed=False, turns=False):
    """Same arguments and result as the reference; see `supports`. Does not wait for the GPU."""
    batch, length = mask.shape
    parts = cdiv(length, PART) if x is not None else 1
    counts, flags = torch.empty((2, batch), dtype=torch.int32, device=mask.device)
    unlike = None if x is None else torch.empty((parts, batch), dtype=torch.int32, device=mask.device)
    told = (0, 0, 0) if x is None else (x.shape[2], *x.stride()[:2])
    shown, plain = mask.view(torch.uint8), None if plain is None else plain.view(torch.uint8)
    launch(
        sequence_facts_kernel, (batch, parts),
        shown, x, counts, flags, unlike, length, *told, parts,
        PART=PART, BLOCK=512, ROWS=16, COLUMNS=128, num_warps=4,
    )  # fmt: skip
    facts, rows, places = torch.empty(7 + size + mask.numel(), dtype=torch.int64, device=mask.device).split(
        [7, size, mask.numel()]
    )
    starts, keys, padding = torch.empty(3 * (batch + idle) + 1, dtype=torch.int32, device=mask.device).split(
        [batch + idle + 1, batch + idle, batch + idle]
    )
    unseen = torch.empty((mask.numel(), 1), dtype=torch.bool, device=mask.device)
    launch(
        packed_rows_kernel, (batch + 1,),
        shown, plain, counts, flags, unlike, facts, starts, keys, padding, rows, places, unseen.view(torch.uint8),
        batch, length, size, idle, parts,
        HIDDEN=hidden, PLACED=placed, TURNS=turns, BLOCK=256, num_warps=4,
    )  # fmt: skip
    return PackedRows(facts, starts, keys, padding, rows, places, unseen)
