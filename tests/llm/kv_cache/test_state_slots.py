"""Which slots hold whose states: nothing is written that somebody reads, and nothing is lost."""

import random

import numpy as np
import pytest

from accel.llm.kv_cache.block_allocator import WORTH, BlockAllocator
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.kv_cache.state_slots import StateSlots
from support.llm.batching.engines import FULL, text
from support.llm.kv_cache.blocks import check_blocks, check_slots


@pytest.mark.parametrize("slots", [6, 8])
def test_every_row_reads_what_it_has_come_to(slots):
    """Random rows at random times; a slot is named by the text that it holds."""
    states, chosen = StateSlots(3, slots), random.Random(slots)
    texts, held, kept, noted = {}, {}, {}, {}

    def named():
        return {digest: (noted if isinstance(digest, int) else kept)[digest] for digest in states.kept}

    for number in range(600):
        idle, way = [row for row in range(3) if row not in texts], chosen.random()
        if way < 0.2 and idle:
            digest = chosen.choice([None, *(one for one in states.kept if isinstance(one, bytes))])
            states.open(idle[0], digest)
            texts[idle[0]] = () if digest is None else kept[digest]
        elif way < 0.3 and idle and texts:
            row = chosen.choice(list(texts))
            states.fork(row, idle[0])
            texts[idle[0]] = texts[row]
        elif way < 0.4 and texts:
            row, digest = chosen.choice(list(texts)), bytes(f"answer {number}", "ascii") if way < 0.37 else None
            kept |= {} if digest is None else {digest: noted.get(row)}
            states.close(row, digest)
            del texts[row]
        elif texts:
            rows = np.array(chosen.sample(list(texts), chosen.randint(1, len(texts))))
            pairs = states.step(rows).tolist()
            for row, (read, _) in zip(rows.tolist(), pairs, strict=True):
                assert not texts[row] or held[read] == texts[row]
            if way < 0.5:
                states.undo(rows)
                continue
            for row, (_, written) in zip(rows.tolist(), pairs, strict=True):
                texts[row] = held[written] = (*texts[row], number)
            if way < 0.6:
                noted[int(rows[-1])] = texts[int(rows[-1])]
                states.note(int(rows[-1]), number)
            elif way < 0.8:
                kept[bytes(str(number), "ascii")] = texts[int(rows[0])]
                states.keep(int(rows[0]), bytes(str(number), "ascii"))
        if way > 0.99:
            states.forget()
        check_slots(states, np.array(sorted(texts), int))
        assert {digest: held[slot] for digest, slot in states.kept.items()} == named()
    assert len(states.kept) <= slots


def test_too_few():
    with pytest.raises(ValueError, match="5 slots for states, where 3 rows need 6"):
        StateSlots(3, 5)


def test_states_go_with_their_blocks_and_blocks_are_not_found_without_them():
    pool, tokens = BlockAllocator((FULL,), 9, 2, 8, True, slots=6), text([1, 2, 3], 9)
    for found, kept in ((0, False), (0, True), (3 * BLOCK, False)):
        assert pool.open(0, tokens) == found
        assert pool.ends(tokens, found) == ([] if found else [3 * BLOCK])
        pool.extend(0, len(tokens))
        pool.commit(0, tokens)
        pool.states.step(np.array([0]))
        if kept:
            pool.keep(0, 3 * BLOCK)
        pool.close(0)
        check_blocks(pool)
    assert pool.ends(text([1, 2, 4, 5], 9), 0) == [2 * BLOCK, 4 * BLOCK] and WORTH == 2 * BLOCK
    assert pool.open(1, text([5] * 6)) == 0 and pool.extend(1, 6 * BLOCK)  # the last of the three goes
    check_blocks(pool)
    assert not pool.states.kept and pool.open(0, tokens) == 0
    pool.forget()
    check_blocks(pool)
