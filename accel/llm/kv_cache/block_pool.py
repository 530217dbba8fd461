"""Which page belongs to which row: the host's side of the memory that `accel.llm.kv_cache.pages.PagePool` holds.

Pages are counted by how many rows hold them. A page that nobody holds any more is cached if its block has a hash: a
later request whose prompt begins alike takes it over, until the page is needed otherwise. The least recently used goes
first (automatic prefix caching, as in vLLM: Kwon et al., 2023, "PagedAttention").
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from accel.llm.kv_cache.blocks import BLOCK
from accel.llm.kv_cache.layer_sets import LayerSet


def block_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block of token ids behind the block with the hash `before`, which is empty for the first block.

    BLAKE2b of 128 bits: two texts of the same hash do not occur. Raises ValueError for a negative id, by which the
    host says that it does not know the token yet.
    """
    if min(tokens) < 0:
        raise ValueError(f"token ids from 0 on have a hash, not {min(tokens)}")
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """Pages of full blocks, by set and hash. A page stands for one block at most, a block for one page of each set."""

    def __init__(self, sets: Sequence[LayerSet]):
        self.sets = tuple(sets)
        self.pages: list[dict[bytes, int]] = [{} for _ in sets]
        self.entries: dict[int, tuple[int, bytes]] = {}  # by page: set and hash
        # A hit goes only as far as a set without window knows every block; 0 where all have windows.
        self.whole = next((place for place, one in enumerate(self.sets) if one.window is None), None)

    def __contains__(self, page: int) -> bool:
        return page in self.entries

    def add(self, place: int, digest: bytes, page: int) -> None:
        """The page of set `place` holds this block. Where another does already, that one stays the one to be found."""
        if digest not in self.pages[place]:
            self.pages[place][digest] = page
            self.entries[page] = place, digest

    def remove(self, page: int) -> None:
        place, digest = self.entries.pop(page)
        del self.pages[place][digest]

    def clear(self) -> None:
        self.entries.clear()
        for pages in self.pages:
            pages.clear()

    def prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the longest run of full blocks at the beginning of these tokens that need not be computed again.

        Of k blocks every set must hold those that a token at k * BLOCK or later sees. One token is left to be computed.
        """
        digests: list[bytes] = []
        for block in range((len(tokens) - 1) // BLOCK if self.entries else 0):
            digest = block_digest(digests[-1] if digests else b"", tokens[block * BLOCK : (block + 1) * BLOCK])
            if self.whole is not None and digest not in self.pages[self.whole]:
                break
            digests.append(digest)
        # How many blocks in a row each set holds, up to and with each block.
        runs = [
            list(accumulate((digest in pages for digest in digests), lambda run, held: (run + 1) * held, initial=0))
            for pages in self.pages
        ]
        for blocks in range(len(digests), 0, -1):
            needed = (blocks - one.first_seen(blocks * BLOCK) for one in self.sets)
            if all(run[blocks] >= need for run, need in zip(runs, needed, strict=True)):
                return digests[:blocks]
        return []


class BlockPool:
    """Pages 1 to `pages` - 1, for `rows` rows of up to `columns` blocks each. Page 0 is nobody's. For one thread.

    share: whether rows share blocks of prompts that begin alike. Raises ValueError where no row could hold one block.

    A row is opened, extended before its tokens are stored, committed, and closed; wrong order raises ValueError.
    table: (sets, rows, columns) int32, what kernels are to find; 0 where a row holds nothing. held: (rows,) int64,
    blocks that the row has come to, those that `slide` gave back too. committed: (rows,) int64, blocks that others may
    find; a row with more full blocks than that is one to be committed.
    """

    def __init__(self, sets: Sequence[LayerSet], pages: int, rows: int, columns: int, share: bool):
        self.sets, self.pages, self.share = tuple(sets), pages, share
        if pages <= len(self.sets):
            raise ValueError(
                f"{pages} pages, of which page 0 is nobody's: too few for a block of {len(self.sets)} sets"
            )
        self.table = np.zeros((len(self.sets), rows, columns), np.int32)
        self.first = np.zeros((len(self.sets), rows), np.int64)  # the first block not yet given back
        self.held = np.zeros(rows, np.int64)
        self.committed = np.zeros(rows, np.int64)
        self.opened = np.zeros(rows, bool)
        self.digests: list[list[bytes] | None] = [None] * rows  # of committed blocks; None: not to be found by others
        self.references = np.zeros(pages, np.int64)
        self.unused = list(range(pages - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.index = PrefixIndex(self.sets)
        self.sliding = np.array([place for place, one in enumerate(self.sets) if one.window is not None], np.int64)
        self.windows = np.array([[one.window] for one in self.sets if one.window is not None], np.int64)
        self._changed: list[np.ndarray] = []

    @property
    def free(self) -> int:
        """Pages that could be given: unused, or only cached."""
        return len(self.unused) + len(self.cached)

    def open(self, row: int, tokens: Sequence[int]) -> int:
        """A request with this prompt takes a row. How many of its tokens are there already, as blocks of others.

        A multiple of BLOCK and less than len(tokens). Takes no page from anybody.
        """
        self._expect(row, opened=False)
        if len(tokens) > self.table.shape[2] * BLOCK:
            raise ValueError(f"{len(tokens)} tokens in a row of up to {self.table.shape[2] * BLOCK}")
        digests = self.index.prefix(tokens) if self.share else []
        blocks = len(digests)
        self.opened[row], self.held[row], self.committed[row] = True, blocks, blocks
        self.digests[row] = digests if self.share else None
        for place, one in enumerate(self.sets):
            first = self.first[place, row] = one.first_seen(blocks * BLOCK)
            pages = [self.index.pages[place][digest] for digest in digests[first:]]
            for page in pages:
                self.cached.pop(page, None)
            self.references[pages] += 1
            self._set(place, row, np.arange(first, blocks), pages)
        return blocks * BLOCK

    def extend(self, row: int, length: int) -> bool:
        """Pages for tokens up to `length`. False where there are too few, and then nothing has changed."""
        return self.extend_all([row], [length]) == 1

    def extend_all(self, rows: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> int:
        """Row by row as `extend`, up to the first for which there are too few pages. How many rows have theirs.

        rows: (n,), each once. lengths: (n,). Where all have room it is three operations on arrays.
        """
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
        pages = self._take(len(self.sets) * len(columns)).reshape(len(self.sets), -1)
        self._set(np.arange(len(self.sets))[:, None], rows[which], columns, pages)
        self.held[rows[:fit]] = stop[:fit]
        return int(short[fit]) if fit < len(short) else total

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        """These first tokens of the row are stored, or will be before whatever is launched next.

        Others may find their full blocks from now on. Costs nothing where there is no new one; so all tokens of the row
        may be given each time. Before `slide`, so that what slides out of a window can be found.
        """
        start, stop = int(self.committed[row]), len(tokens) // BLOCK
        if stop <= start:
            return
        self._expect(row, opened=True)
        if stop > self.held[row]:
            raise ValueError(f"{len(tokens)} tokens stored in a row with pages for {self.held[row] * BLOCK}")
        digests = self.digests[row]
        if digests is not None:
            new: list[bytes] = []
            before = digests[-1] if digests else b""
            for block in range(start, stop):
                before = block_digest(before, tokens[block * BLOCK : (block + 1) * BLOCK])
                new.append(before)
            digests += new
            for place in range(len(self.sets)):
                for block in range(max(start, int(self.first[place, row])), stop):
                    self.index.add(place, digests[block], int(self.table[place, row, block]))
        self.committed[row] = stop

    def slide(self, row: int, length: int) -> None:
        """Sets with windows give back what no token at `length` or later sees."""
        self.slide_all([row], [length])

    def slide_all(self, rows: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """`slide` of many rows, each once."""
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
        pages = self.table[places[which], rows[which], columns]
        self.first[places, rows] = seen
        self._set(places[which], rows[which], columns, 0)
        self._release(pages)

    def close(self, row: int) -> None:
        """The row gives all back. Blocks with a hash can be found until they are evicted, the last of the row first."""
        self._expect(row, opened=True)
        held = int(self.held[row])
        pages = self.table[:, row, :held][:, ::-1].T.flatten()
        where = np.nonzero(self.table[:, row, :held])
        self._set(where[0], row, where[1], 0)
        self.opened[row], self.held[row], self.committed[row], self.first[:, row] = False, 0, 0, 0
        self.digests[row] = None
        self._release(pages[pages > 0])

    def fork(self, row: int, other: int, length: int) -> list[tuple[int, int]] | None:
        """The row `other` goes on with the first `length` tokens of this one, which are stored.

        Full blocks are shared. Of a block begun it gets a page of each set: the pages to be copied, (from, to) each,
        before anything else is launched. None where there are too few pages, and then nothing has changed.
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
        pages = shared[where]
        self.references[pages] += 1
        self._set(where[0], other, where[1], pages)
        copies = []
        if begun:
            new = self._take(len(self.sets))
            copies = list(zip(self.table[:, row, full].tolist(), new.tolist(), strict=True))
            self._set(np.arange(len(self.sets)), other, full, new)
        self.opened[other], self.held[other], self.first[:, other] = True, held, self.first[:, row]
        self.committed[other] = min(self.committed[row], full)
        digests = self.digests[row]
        self.digests[other] = None if digests is None else digests[:full]
        return copies

    def forget(self) -> None:
        """No block can be found any more, also none of open rows: the weights are others now."""
        self.index.clear()
        self.unused.extend(self.cached)
        self.cached.clear()
        self.digests = [None] * len(self.digests)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Places of the flat table that were written since the last call, (n,) int64, each once; what they hold now."""
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        places = np.unique(np.concatenate(self._changed))
        self._changed = []
        return places, self.table.reshape(-1)[places]

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for exactly once. For tests: it looks at everything."""
        columns = np.arange(self.table.shape[2])
        there = (self.first[:, :, None] <= columns) & (columns < self.held[:, None])
        assert np.array_equal(self.table > 0, there), "a row holds other columns than it should"
        assert (self.first <= self.held).all() and (self.committed <= self.held).all()
        assert not self.held[~self.opened].any() and not self.first[:, ~self.opened].any()
        assert not self.first[[one.window is None for one in self.sets]].any(), "given back without a window"
        places, _, at = np.nonzero(self.table)
        pages = self.table[self.table > 0]
        assert np.array_equal(self.references, np.bincount(pages, minlength=self.pages)), "references are miscounted"
        uses = np.unique(np.stack([pages, places, at], 1), axis=0)
        assert len(np.unique(pages)) == len(uses), "a page serves two sets or two places"
        every = [*self.unused, *self.cached, *np.unique(pages).tolist()]
        assert sorted(every) == list(range(1, self.pages)), "a page is lost, or is there twice"
        assert all(page in self.index for page in self.cached)
        assert not any(page in self.index for page in self.unused)
        found = [
            (page, (p, digest)) for p, by_digest in enumerate(self.index.pages) for digest, page in by_digest.items()
        ]
        assert len(found) == len(self.index.entries) and dict(found) == self.index.entries

    def _expect(self, rows: int | np.ndarray, opened: bool) -> None:
        if not np.all(self.opened[rows] == opened):
            raise ValueError(f"row {rows} is {'not open' if opened else 'open already'}")

    def _set(
        self,
        places: int | np.ndarray,
        rows: int | np.ndarray,
        columns: int | np.ndarray,
        pages: int | list[int] | np.ndarray,
    ) -> None:
        """Writes into the table and notes where."""
        self.table[places, rows, columns] = pages
        changed = (places * self.table.shape[1] + rows) * self.table.shape[2] + columns
        self._changed.append(np.ravel(changed))

    def _take(self, number: int) -> np.ndarray:
        """So many pages, at most `free`, each with one reference: unused ones, then those cached for longest."""
        start = max(0, len(self.unused) - number)
        pages = self.unused[start:]
        del self.unused[start:]
        while len(pages) < number:
            page = self.cached.popitem(last=False)[0]
            self.index.remove(page)
            pages.append(page)
        taken = np.array(pages, np.int32)
        self.references[taken] = 1
        return taken

    def _release(self, pages: np.ndarray) -> None:
        """One reference less for each, in the order in which they may be evicted."""
        np.subtract.at(self.references, pages, 1)
        left: Iterable[int] = dict.fromkeys(pages[self.references[pages] == 0].tolist())
        for page in left:
            if page in self.index:
                self.cached[page] = None
            else:
                self.unused.append(page)


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers from start[i] to stop[i] - 1 for each i in turn: which i, and the number."""
    sizes = stop - start
    which = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return which, start[which] + within
