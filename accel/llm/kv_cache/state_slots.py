"""Assigns slots for states to rows, on the host. What is in a slot is written once, by one step, and never edited.

So several rows may go on from one slot, and who keeps it copies nothing: a row reads the slot that it has come to, and
writes another one. States at the ends of blocks are kept under the hashes of those blocks (as in SGLang's cache of
Mamba states, 2025). The least recently used go first.
"""

from collections import OrderedDict

import numpy as np


class StateSlots:
    """`slots` slots for `rows` rows, at least two for each: one that it reads, and one that it writes next.

    references: (slots,) int64, rows that read or write it, and whether it is kept. current, spare: (rows,) int64, the
    slot of the state after all planned steps, and that which the next step writes. kept: slots by hash, the least
    recently used first; by the row's number where the hash is not known yet. noted: (rows,) int64, the length of that.
    For one thread. Raises ValueError for too few slots.
    """

    def __init__(self, rows: int, slots: int):
        if slots < 2 * rows:
            raise ValueError(f"{slots} slots for states, where {rows} rows need {2 * rows}")
        self.references = np.zeros(slots, np.int64)
        self.unused = list(range(slots - 1, -1, -1))
        self.current, self.spare, self.noted = np.zeros((3, rows), np.int64)
        self.kept: OrderedDict[bytes | int, int] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.kept

    def open(self, row: int, digest: bytes | None) -> None:
        """Begins a row: after the tokens of a hash whose state is kept, or before its first token."""
        if digest is not None:
            self.kept.move_to_end(digest)
        self._begin(row, None if digest is None else self.kept[digest])

    def fork(self, row: int, other: int) -> None:
        """The row `other` begins with what this one has come to."""
        self._begin(other, int(self.current[row]))

    def close(self, row: int, digest: bytes | None = None) -> None:
        """Ends a row. digest: of the tokens whose state was noted last, which is then kept."""
        slot = self.kept.pop(row, None)
        if slot is not None:
            if digest is None or digest in self.kept:
                self._release(slot)
            else:
                self.kept[digest] = slot
        self._release(int(self.current[row]))
        self._release(int(self.spare[row]))

    def step(self, rows: np.ndarray) -> np.ndarray:
        """What a step of these rows, (n,) and each once, reads and writes: (n, 2) slots."""
        for row in rows[self.references[self.spare[rows]] > 1].tolist():  # others read what it has read before
            self._release(int(self.spare[row]))
            self.spare[row] = self._take()
        self._turn(rows)
        return np.stack([self.spare[rows], self.current[rows]], axis=1)

    def undo(self, rows: np.ndarray) -> None:
        """The last step of these rows did not run."""
        self._turn(rows)

    def keep(self, row: int, digest: bytes) -> None:
        """What the row has come to is kept under the hash of its last block, once the planned steps have run."""
        if digest not in self.kept:
            self._keep(row, digest)

    def note(self, row: int, length: int) -> None:
        """The same where the hash of so many tokens is not known yet: `close` has it. In place of what was noted."""
        self.drop(row)
        self._keep(row, row)
        self.noted[row] = length

    def drop(self, digest: bytes | int) -> None:
        """Does not keep the state of this hash any longer, if it did."""
        slot = self.kept.pop(digest, None)
        if slot is not None:
            self._release(slot)

    def forget(self) -> None:
        """Keeps none."""
        for digest in list(self.kept):
            self.drop(digest)

    def _begin(self, row: int, slot: int | None) -> None:
        if slot is not None:
            self.references[slot] += 1
        self.current[row] = self._take() if slot is None else slot
        self.spare[row] = self._take()

    def _keep(self, row: int, digest: bytes | int) -> None:
        self.kept[digest] = slot = int(self.current[row])
        self.references[slot] += 1

    def _turn(self, rows: np.ndarray) -> None:
        self.current[rows], self.spare[rows] = self.spare[rows], self.current[rows]

    def _take(self) -> int:
        """A slot with one reference: an unused one, or that of states which are kept and which no row reads."""
        while not self.unused:  # rows have two at most, so that one is kept alone
            self.drop(next(iter(self.kept)))
        slot = self.unused.pop()
        self.references[slot] = 1
        return slot

    def _release(self, slot: int) -> None:
        self.references[slot] -= 1
        if not self.references[slot]:
            self.unused.append(slot)
