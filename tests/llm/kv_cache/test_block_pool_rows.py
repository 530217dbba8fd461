"""Rows come, go on, fork and end at random: what each reads at every token is its own, and no page is ever lost."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.shape import BLOCK
from support.llm.batching.engines import FULL, NARROW, ROWS, WIDE, text
from support.llm.kv_cache.blocks import check_blocks

SETS = [(FULL,), (NARROW,), (FULL, NARROW), (NARROW, FULL, WIDE), (LayerSet((0,), 1), FULL)]
COLUMNS = 9
texts = st.builds(text, st.lists(st.sampled_from([0, 0, 0, 1]), max_size=7), st.sampled_from([1, 2, BLOCK - 1, BLOCK]))
some = st.sampled_from([1, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
number = st.integers(0, 11)
some_open = precondition(lambda self: self.texts)


class Batch(RuleBasedStateMachine):
    """A pool, and the memory as a device would have it: a table that only `changes` writes, pages that rows write.

    A page keeps for each token a number for the text up to and with that token. texts: of each row all tokens; the
    first `stored` of them are in its pages.
    """

    @initialize(
        sets=st.sampled_from(SETS), share=st.sampled_from([True, True, False]), room=st.sampled_from([0, 3, 40])
    )
    def begin(self, sets, share, room):
        self.sets, self.pages = sets, (1 + room) * len(sets) + 1
        self.pool = BlockAllocator(sets, self.pages, ROWS, COLUMNS, share)
        self.table = np.zeros((len(sets), ROWS, COLUMNS), np.int64)
        self.memory = np.full((self.pages, BLOCK), -1)
        self.numbers: dict[tuple, int] = {}
        self.texts, self.stored = {}, {}

    def numbered(self, tokens) -> np.ndarray:
        """A number for each beginning of a text, equal for equal ones."""
        last, found = -1, []
        for token in tokens:
            last = self.numbers.setdefault((last, token), len(self.numbers))
            found.append(last)
        return np.array(found, np.int64)

    def sync(self):
        places, values = self.pool.changes()
        assert len(np.unique(places)) == len(places)
        self.table.reshape(-1)[places] = values

    def write(self, row, start, numbers):
        at = start + np.arange(len(numbers))
        for place in range(len(self.sets)):
            pages = self.table[place, row, at // BLOCK]
            assert pages.all()
            self.memory[pages, at % BLOCK] = numbers

    def free(self) -> int:
        return self.pages - 1 - len(np.unique(self.table[self.table > 0]))

    def more(self, row, length) -> int:
        return (
            (-(-length // BLOCK) - self.pool.held[row]) * len(self.sets) if length > self.pool.held[row] * BLOCK else 0
        )

    def store(self, row, length):
        self.write(row, self.stored[row], self.numbered(self.texts[row][:length])[self.stored[row] :])
        self.stored[row] = length

    def opened(self, number) -> int:
        return sorted(self.texts)[number % len(self.texts)]

    def closed(self, number) -> int | None:
        rows = [row for row in range(ROWS) if row not in self.texts]
        return rows[number % len(rows)] if rows else None

    @rule(number=number, prompt=texts, whole=st.booleans(), slide=st.booleans())
    def open(self, number, prompt, whole, slide):
        """whole: the prompt is stored at once."""
        row = self.closed(number)
        if row is None:
            return
        there = self.pool.open(row, prompt)
        assert there % BLOCK == 0 and there < len(prompt) and (self.pool.share or not there)
        self.texts[row], self.stored[row] = list(prompt), there
        self.sync()
        if whole:
            self.go_on(row, len(prompt) - there, True, slide, 0)

    @some_open
    @rule(number=number, new=some, commit=st.booleans(), slide=st.booleans(), token=st.sampled_from([0, 0, 1]))
    def one_goes_on(self, number, new, commit, slide, token):
        self.go_on(self.opened(number), new, commit, slide, token)

    def go_on(self, row, number, commit, slide, token):
        """A chunk of the prompt, or new tokens."""
        length = min(self.stored[row] + number, COLUMNS * BLOCK)
        self.sync()
        fits = self.more(row, length) <= self.free()
        before = self.pool.table.copy()
        assert self.pool.extend(row, length) == fits
        if not fits:
            assert np.array_equal(self.pool.table, before) and not len(self.pool.changes()[0])
            return
        self.texts[row] += [token] * (length - len(self.texts[row]))
        self.sync()
        self.store(row, length)
        if commit:
            self.pool.commit(row, self.texts[row][:length])
        if slide:
            self.pool.slide_all([row], [length])
        self.sync()

    @rule(number=st.sampled_from([1, 1, BLOCK]), token=st.sampled_from([0, 1]), back=st.booleans())
    def all_go_on(self, number, token, back):
        rows = sorted(self.texts, reverse=back)
        lengths = [min(self.stored[row] + number, COLUMNS * BLOCK) for row in rows]
        self.sync()
        wanted = np.cumsum([self.more(row, length) for row, length in zip(rows, lengths, strict=True)])
        fit = int((wanted <= self.free()).sum())
        assert self.pool.extend_all(np.array(rows, int), np.array(lengths, int)) == fit
        self.sync()
        for row, length in zip(rows[:fit], lengths, strict=False):
            self.texts[row] += [token] * (length - len(self.texts[row]))
            self.store(row, length)
            self.pool.commit(row, self.texts[row][:length])
        self.pool.slide_all(np.array(rows[:fit], int), np.array(lengths[:fit], int))
        self.sync()

    @some_open
    @rule(number=number, into=number, less=st.sampled_from([0, 0, 1, BLOCK + 1]))
    def fork(self, number, into, less):
        row, other = self.opened(number), self.closed(into)
        if other is None:
            return
        length = max(0, self.stored[row] - less)
        begun = length % BLOCK > 0
        passed = [one.first_seen(length) < self.pool.first[place, row] for place, one in enumerate(self.sets)]
        if any(passed):
            with pytest.raises(ValueError, match="not all there"):
                self.pool.fork(row, other, length)
            return
        copies = self.pool.fork(row, other, length)
        assert (copies is None) == (begun and len(self.sets) > self.free())
        if copies is None:
            return
        assert len(copies) == begun * len(self.sets)
        for source, target in copies:
            self.memory[target] = self.memory[source]
        self.texts[other], self.stored[other] = self.texts[row][:length], length
        self.sync()

    @some_open
    @rule(number=number, vain=st.booleans())
    def close(self, number, vain):
        """vain: a token more has been computed before it was known that the row had ended."""
        row = self.opened(number)
        length = self.stored.pop(row)
        if vain and length < COLUMNS * BLOCK and self.pool.extend(row, length + 1):
            self.sync()
            self.write(row, length, [-2])
        self.pool.close(row)
        del self.texts[row]
        self.sync()
        assert not self.table[:, row].any()

    @rule(number=number)
    def forget(self, number):
        if number:  # rarely
            return
        self.pool.forget()
        row = self.closed(0)
        if row is not None:
            assert self.pool.open(row, text([0] * 7)) == 0
            self.pool.close(row)

    @invariant()
    def every_page_is_somewhere(self):
        check_blocks(self.pool)
        assert self.pool.free == self.free()

    @invariant()
    def rows_read_their_own_tokens(self):
        assert np.array_equal(self.table, self.pool.table)
        for row, length in self.stored.items():
            numbers = self.numbered(self.texts[row][:length])
            for place, one in enumerate(self.sets):
                at = np.arange(0 if one.window is None else max(0, length - one.window + 1), length)
                assert np.array_equal(self.memory[self.table[place, row, at // BLOCK], at % BLOCK], numbers[at])

    def teardown(self):
        if hasattr(self, "texts"):
            for row in list(self.texts):
                self.pool.close(row)
            check_blocks(self.pool)
            assert self.pool.free == self.pages - 1


Batch.TestCase.settings = settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=30)
TestBatch = Batch.TestCase
