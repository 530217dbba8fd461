"""Assigns blocks of a `PagedKVCache` to rows, on the host.

Each block counts the rows that hold it. A block without any is cached if its tokens have a hash: a later request whose
prompt begins alike takes it over, until the block is needed. The least recently used goes first (automatic prefix
caching, as in vLLM: Kwon et al., 2023, "PagedAttention").
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.prefix_index import PrefixIndex, block_digest
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.kv_cache.state_slots import StateSlots

WORTH = 2 * BLOCK  # tokens that kept states have to save who finds them: to keep them, a prompt takes one more step


class BlockAllocator:
    """Blocks 1 to `blocks` - 1, for `rows` rows of up to `columns` each. Block 0 belongs to no row. For one thread.

    share: whether rows share blocks of prompts that begin alike. slots: for states, None where layers keep none. Raises
    ValueError where no row could hold one block, or not all rows their states.

    A row is opened, extended before its tokens are stored, committed, and closed; wrong order raises ValueError.
    table: (sets, rows, columns) int32, as kernels read it; 0 where a row holds nothing. held: (rows,) int64, columns
    up to the row's end, also those that `slide_all` gave back. committed: (rows,) int64, columns that others may find.
    """

    def __init__(
        self, sets: Sequence[LayerSet], blocks: int, rows: int, columns: int, share: bool, slots: int | None = None
    ):
        self.sets, self.blocks, self.share = tuple(sets), blocks, share
        if blocks <= len(self.sets):
            raise ValueError(
                f"{blocks} blocks, of which block 0 is nobody's: too few for a block of {len(self.sets)} sets"
            )
        self.table = np.zeros((len(self.sets), rows, columns), np.int32)
        self.first = np.zeros((len(self.sets), rows), np.int64)  # the first block not yet given back
        self.held = np.zeros(rows, np.int64)
        self.committed = np.zeros(rows, np.int64)
        self.opened = np.zeros(rows, bool)
        self.digests: list[list[bytes] | None] = [None] * rows  # of committed blocks; None: not to be found by others
        self.references = np.zeros(blocks, np.int64)
        self.unused = list(range(blocks - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.states = None if slots is None else StateSlots(rows, slots)
        self.index = PrefixIndex(self.sets, self.states)
        self.sliding = np.array([place for place, one in enumerate(self.sets) if one.window is not None], np.int64)
        self.windows = np.array([[one.window] for one in self.sets if one.window is not None], np.int64)
        self._changed: list[np.ndarray] = []

    @property
    def free(self) -> int:
        """Blocks that could be given: unused, or only cached."""
        return len(self.unused) + len(self.cached)

    def open(self, row: int, tokens: Sequence[int]) -> int:
        """Gives a row to a request, evicting no block. Returns how many tokens are cached: a multiple of BLOCK."""
        self._expect(row, opened=False)
        if len(tokens) > self.table.shape[2] * BLOCK:
            raise ValueError(f"{len(tokens)} tokens in a row of up to {self.table.shape[2] * BLOCK}")
        digests = self.index.prefix(tokens) if self.share else []
        columns = len(digests)
        self.opened[row], self.held[row], self.committed[row] = True, columns, columns
        self.digests[row] = digests if self.share else None
        for place, one in enumerate(self.sets):
            first = self.first[place, row] = one.first_seen(columns * BLOCK)
            blocks = [self.index.blocks[place][digest] for digest in digests[first:]]
            for block in blocks:
                self.cached.pop(block, None)
            self.references[blocks] += 1
            self._set(place, row, np.arange(first, columns), blocks)
        if self.states is not None:
            self.states.open(row, digests[-1] if digests else None)
        return columns * BLOCK

    def extend(self, row: int, length: int) -> bool:
        """Adds blocks for tokens up to `length`. False if there are too few, and then nothing has changed."""
        return self.extend_all([row], [length]) == 1

    def extend_all(self, rows: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> int:
        """As `extend` of rows, (n,) each once, until there are too few blocks. Returns how many rows are done."""
        rows, lengths = np.asarray(rows), np.asarray(lengths)
        short = np.flatnonzero(lengths > self.held[rows] * BLOCK)
        total = len(rows)
        if not short.size:
            return total
        rows, lengths = rows[short], lengths[short]
        self._expect(rows, opened=True)
        if lengths.max() > self.table.shape[2] * BLOCK:
            raise ValueError(f"{lengths.max()} tokens in a row of up to {self.table.shape[2] * BLOCK}")
        if len(np.unique(rows)) < len(rows):
            raise ValueError("a row is to be extended twice at once")
        start, stop = self.held[rows], -(-lengths // BLOCK)
        fit = int(np.searchsorted(np.cumsum(stop - start) * len(self.sets), self.free, side="right"))
        which, columns = _ranges(start[:fit], stop[:fit])
        blocks = self._take(len(self.sets) * len(columns)).reshape(len(self.sets), -1)
        self._set(np.arange(len(self.sets))[:, None], rows[which], columns, blocks)
        self.held[rows[:fit]] = stop[:fit]
        return int(short[fit]) if fit < len(short) else total

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """Lets other rows find the full blocks of these first tokens, which are stored, or will be by the next launch.

        All tokens of the row may be given each time: without a new block it costs nothing. To be called before
        `slide_all`, so that blocks which leave a window can be found.
        """
        start, stop = int(self.committed[row]), len(tokens) // BLOCK
        if stop <= start:
            return
        self._expect(row, opened=True)
        if stop > self.held[row]:
            raise ValueError(f"{len(tokens)} tokens stored in a row with blocks for {self.held[row] * BLOCK}")
        digests = self.digests[row]
        if digests is not None:
            new: list[bytes] = []
            before = digests[-1] if digests else b""
            for column in range(start, stop):
                before = block_digest(before, tokens[column * BLOCK : (column + 1) * BLOCK])
                new.append(before)
            digests += new
            for place in range(len(self.sets)):
                for column in range(max(start, int(self.first[place, row])), stop):
                    self.index.add(place, digests[column], int(self.table[place, row, column]))
        self.committed[row] = stop

    def slide_all(self, rows: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Sets with windows give back what no token of these rows at `lengths` or later sees. rows: each once."""
        if not self.sliding.size:
            return
        rows, lengths = np.asarray(rows), np.asarray(lengths)
        places = self.sliding[:, None]
        seen = np.clip((lengths - self.windows + 1) // BLOCK, 0, self.held[rows])
        passed = np.nonzero(seen > self.first[places, rows])
        if not passed[0].size:
            return
        places, rows, seen = self.sliding[passed[0]], rows[passed[1]], seen[passed]
        which, columns = _ranges(self.first[places, rows], seen)
        blocks = self.table[places[which], rows[which], columns]
        self.first[places, rows] = seen
        self._set(places[which], rows[which], columns, 0)
        self._release(blocks)

    def close(self, row: int) -> None:
        """Gives all blocks of the row back. Those with a hash can be found until evicted, the last of the row first."""
        self._expect(row, opened=True)
        held = int(self.held[row])
        if self.states is not None:
            digests, noted = self.digests[row] or [], int(self.states.noted[row]) // BLOCK
            self.states.close(row, digests[noted - 1] if 0 < noted <= len(digests) else None)
        blocks = self.table[:, row, :held][:, ::-1].T.flatten()
        where = np.nonzero(self.table[:, row, :held])
        self._set(where[0], row, where[1], 0)
        self.opened[row], self.held[row], self.committed[row], self.first[:, row] = False, 0, 0, 0
        self.digests[row] = None
        self._release(blocks[blocks > 0])

    def fork(self, row: int, other: int, length: int) -> list[tuple[int, int]] | None:
        """The row `other` takes over the first `length` tokens of this one, which are stored.

        Full blocks are shared. Returns the unfinished blocks to be copied, (from, to) for each set, before anything
        else is launched. None if there are too few blocks, and then nothing has changed.
        """
        self._expect(row, opened=True)
        self._expect(other, opened=False)
        full, begun = divmod(length, BLOCK)
        held = full + (begun > 0)
        if held > self.held[row] or any(self.first[p, row] > s.first_seen(length) for p, s in enumerate(self.sets)):
            raise ValueError(f"the first {length} tokens of row {row} are not all there")
        if begun and len(self.sets) > self.free:
            return None
        shared = self.table[:, row, :full]
        where = np.nonzero(shared)
        blocks = shared[where]
        self.references[blocks] += 1
        self._set(where[0], other, where[1], blocks)
        copies = []
        if begun:
            new = self._take(len(self.sets))
            copies = list(zip(self.table[:, row, full].tolist(), new.tolist(), strict=True))
            self._set(np.arange(len(self.sets)), other, full, new)
        self.opened[other], self.held[other], self.first[:, other] = True, held, self.first[:, row]
        self.committed[other] = min(self.committed[row], full)
        digests = self.digests[row]
        self.digests[other] = None if digests is None else digests[:full]
        if self.states is not None:
            self.states.fork(row, other)
        return copies

    def ends(self, tokens: Sequence[int], start: int) -> list[int]:
        """Lengths at which states are worth keeping: where texts part, and behind the last full block."""
        if self.states is None or not self.share:
            return []
        full = {len(self.index.known(tokens)) * BLOCK, (len(tokens) - 1) // BLOCK * BLOCK}
        return sorted(end for end in full if end - start >= WORTH)

    def keep(self, row: int, length: int) -> None:
        """Lets others find the states of a row behind its first tokens, which fill blocks that have been committed.

        Once a step is planned in which the row comes to that length, and before another one is.
        """
        digests = self.digests[row]
        if self.states is not None and digests is not None:
            self.states.keep(row, digests[length // BLOCK - 1])

    def note(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """The same where last tokens are not known yet: others find these states once the rows are closed."""
        if self.states is not None and self.share:
            at_ends = lengths % BLOCK == 0
            for row, length in zip(rows[at_ends].tolist(), lengths[at_ends].tolist(), strict=True):
                self.states.note(row, length)

    def forget(self) -> None:
        """Forgets all hashes, since the weights have changed."""
        self.index.clear()
        self.unused.extend(self.cached)
        self.cached.clear()
        self.digests = [None] * len(self.digests)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Places of the flat table written since the last call, (n,) int64, each once, and their values."""
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        places = np.unique(np.concatenate(self._changed))
        self._changed = []
        return places, self.table.reshape(-1)[places]

    def _expect(self, rows: int | np.ndarray, opened: bool) -> None:
        if not np.all(self.opened[rows] == opened):
            raise ValueError(f"row {rows} is {'not open' if opened else 'open already'}")

    def _set(
        self,
        places: int | np.ndarray,
        rows: int | np.ndarray,
        columns: int | np.ndarray,
        blocks: int | list[int] | np.ndarray,
    ) -> None:
        """Writes into the table and notes where."""
        self.table[places, rows, columns] = blocks
        changed = (places * self.table.shape[1] + rows) * self.table.shape[2] + columns
        self._changed.append(np.ravel(changed))

    def _take(self, number: int) -> np.ndarray:
        """So many blocks, at most `free`, each with one reference: unused ones, then the least recently used."""
        start = max(0, len(self.unused) - number)
        blocks = self.unused[start:]
        del self.unused[start:]
        while len(blocks) < number:
            block = self.cached.popitem(last=False)[0]
            self.index.remove(block)
            blocks.append(block)
        taken = np.array(blocks, np.int32)
        self.references[taken] = 1
        return taken

    def _release(self, blocks: np.ndarray) -> None:
        """One reference less for each, in the order in which they may be evicted."""
        np.subtract.at(self.references, blocks, 1)
        left: Iterable[int] = dict.fromkeys(blocks[self.references[blocks] == 0].tolist())
        for block in left:
            if block in self.index:
                self.cached[block] = None
            else:
                self.unused.append(block)


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers from start[i] to stop[i] - 1 for each i in turn: which i, and the number."""
    sizes = stop - start
    which = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return which, start[which] + within
