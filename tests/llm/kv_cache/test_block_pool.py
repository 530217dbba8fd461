"""Which page belongs to whom: what is shared, what is evicted, what windows give back, what misuse says."""

import sys

import numpy as np
import pytest

from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.prefix_index import block_digest
from accel.llm.kv_cache.shape import BLOCK
from support.llm.batching.engines import FULL, NARROW, ROWS, text
from support.llm.kv_cache.blocks import check_blocks


def pool_of(*sets, pages=100, rows=ROWS, columns=20, share=True) -> BlockAllocator:
    return BlockAllocator(sets or (FULL,), pages, rows, columns, share)


def run(pool, row, tokens, slide=True) -> int:
    """A request from its first token to its last, which stays open; how many tokens were there already."""
    there = pool.open(row, tokens)
    assert pool.extend(row, len(tokens))
    pool.commit(row, tokens)
    if slide:
        pool.slide_all([row], [len(tokens)])
    check_blocks(pool)
    return there


def done(pool, row, tokens) -> int:
    there = run(pool, row, tokens)
    pool.close(row)
    check_blocks(pool)
    return there


def test_a_prompt_shares_its_full_blocks_and_one_token_is_left_to_compute():
    pool = pool_of()
    assert done(pool, 0, text("", 63)) == 0
    assert done(pool, 0, text([1, 2, 3])) == 0
    assert done(pool, 1, text([1, 2, 3])) == 2 * BLOCK
    assert done(pool, 1, text([1, 2, 3], 1)) == 3 * BLOCK
    assert done(pool, 1, text([1, 2], 1)) == 2 * BLOCK
    assert done(pool, 1, text([1, 2, 9], 5)) == 2 * BLOCK
    assert done(pool, 2, text([1], 0)) == 0
    assert pool.free == 99


def test_an_equal_block_behind_another_past_is_another_block():
    pool = pool_of()
    done(pool, 0, text([1, 2, 3]))
    assert done(pool, 0, text([2, 2, 3], 1)) == 0
    assert done(pool, 0, text([2, 3], 1)) == BLOCK
    digest = block_digest(b"", [1] * BLOCK)
    assert digest != block_digest(digest, [1] * BLOCK) and len(digest) == 16


def test_what_was_used_least_recently_goes_first_and_ends_before_beginnings():
    pool = pool_of(pages=1 + 8, columns=8)
    for letter in (1, 2, 3):
        done(pool, 0, text([letter, letter]))
    done(pool, 0, text([1, 1], 1))  # again; a page beside them
    assert pool.unused and len(pool.cached) == 6
    assert run(pool, 1, text([5] * 4)) == 0  # two unused and two of the cached
    assert pool.open(2, text([2, 2], 1)) == 0
    pool.close(2)
    assert run(pool, 0, text([3, 3], 1)) == 2 * BLOCK
    # Its third block is where the second of 1, 1 was.
    assert pool.open(2, text([1, 1], 1)) == BLOCK
    assert pool.free == 0 and not pool.extend(2, BLOCK + 1)
    check_blocks(pool)


@pytest.mark.parametrize("window", [1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK])
def test_a_window_gives_back_what_no_later_token_sees(window):
    one = LayerSet((0,), window)
    pool = pool_of(one)
    pool.open(0, [1])
    pool.extend(0, 10 * BLOCK)
    for length in range(1, 10 * BLOCK):
        pool.slide_all([0], [length])
        seen = [t // BLOCK for t in range(10 * BLOCK) if t > length - window]
        assert np.flatnonzero(pool.table[0, 0])[0] == min(seen), length
    check_blocks(pool)
    for before in (0, 5):  # nothing comes back
        pool.slide_all([0], [before])
        assert np.flatnonzero(pool.table[0, 0])[0] == min(seen)


def test_a_hit_needs_of_a_window_only_what_is_seen_from_there():
    pool, tokens = pool_of(FULL, LayerSet((1,), 2 * BLOCK), pages=200), text(range(8), 1)
    run(pool, 0, tokens)
    assert run(pool, 1, tokens) == 8 * BLOCK
    assert np.flatnonzero(pool.table[1, 1]).tolist() == [6, 7, 8]
    pool.close(0)
    pool.close(1)
    gone = pool.index.blocks[1][pool.index.prefix(tokens)[6]]
    pool.cached.move_to_end(gone, last=False)
    pool.unused, unused = [], pool.unused
    pool._release(pool._take(1))  # evicted: with block 6 of the window, no longer 8 blocks; 7 need 5 and 6; 6 need 4, 5
    pool.unused += unused
    check_blocks(pool)
    assert pool.open(2, tokens) == 6 * BLOCK
    assert np.flatnonzero(pool.table[1, 2]).tolist() == [4, 5]


def test_blocks_are_forgotten_when_the_weights_change():
    pool, tokens = pool_of(), text([1, 2, 3], 1)
    run(pool, 0, tokens[: 2 * BLOCK])
    done(pool, 1, tokens)
    pool.forget()
    check_blocks(pool)
    assert pool.extend(0, len(tokens))
    pool.commit(0, tokens)  # begun with the old weights
    assert done(pool, 1, tokens) == 0
    assert done(pool, 1, tokens) == 3 * BLOCK


def test_misuse_is_told_and_changes_nothing():
    with pytest.raises(ValueError, match="2 blocks"):
        pool_of(FULL, NARROW, pages=2)
    pool = pool_of(pages=3, columns=3)
    for call in (pool.close, lambda row: pool.extend(row, 1), lambda row: pool.commit(row, text([1]))):
        with pytest.raises(ValueError, match="not open"):
            call(0)
    with pytest.raises(ValueError, match="193 tokens in a row of up to 192"):
        pool.open(0, text([1, 2, 3], 1))
    pool.open(0, text([1]))
    with pytest.raises(ValueError, match="open already"):
        pool.open(0, [1])
    with pytest.raises(ValueError, match="open already"):
        pool.fork(0, 0, 0)
    with pytest.raises(ValueError, match="193 tokens"):
        pool.extend(0, 193)
    with pytest.raises(ValueError, match="twice"):
        pool.extend_all([0, 0], [1, 1])
    with pytest.raises(ValueError, match="blocks for 0"):
        pool.commit(0, text([1]))
    pool.extend(0, 2 * BLOCK)
    for tokens in ([*text([1]), *[-1] * BLOCK], [-1] * BLOCK):
        with pytest.raises(ValueError, match="not -1"):
            pool.commit(0, tokens)
    pool.commit(0, text([1, 1]))
    check_blocks(pool)
    pool.close(0)
    assert pool.free == 2 and pool.open(0, text([1, 1], 1)) == 2 * BLOCK


def calls(function, *arguments) -> int:
    """How many calls Python makes on the way, those into numpy too."""
    made = []
    sys.setprofile(lambda frame, event, argument: made.append(event) if event in ("call", "c_call") else None)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return len(made)


def test_the_work_of_a_step_grows_with_the_rows_that_need_pages_not_with_all():
    """1024 rows of which none needs a page take about 10 microseconds; of which 16 do, as on average, 50."""
    counts = {}
    for rows in (16, 1024):
        pool = pool_of(FULL, NARROW, pages=20000, rows=rows, columns=8)
        for at in range(rows):
            pool.open(at, [1])
        every, lengths = np.arange(rows), np.full(rows, 2 * BLOCK + 40)
        assert pool.extend_all(every, lengths) == rows
        pool.slide_all(every, lengths)
        pool.changes()
        counts[rows] = [
            calls(pool.extend_all, every, lengths + 24),
            calls(pool.slide_all, every, lengths),
            calls(pool.extend_all, every, np.where(every < 16, lengths + 25, lengths)),
            calls(pool.slide_all, every, np.where(every < 16, lengths + BLOCK, lengths)),
            calls(pool.changes),
        ]
        check_blocks(pool)
    assert counts[16] == counts[1024]
    assert max(counts[16][:2]) < 30 and max(counts[16]) < 150


def test_changes_are_each_place_once_with_what_it_holds_now():
    pool = pool_of(FULL, NARROW, columns=3)
    assert [len(told) for told in pool.changes()] == [0, 0]
    pool.open(1, text([1, 2]))
    pool.extend(1, 2 * BLOCK)
    pool.close(1)
    pool.open(1, text([1, 2]))
    pool.extend(1, BLOCK)
    places, values = pool.changes()
    assert places.tolist() == [3, 4, 15, 16] and values.tolist() == [*pool.table[0, 1, :2], *pool.table[1, 1, :2]]
    assert (values > 0).tolist() == [True, False] * 2
    assert [len(told) for told in pool.changes()] == [0, 0]
