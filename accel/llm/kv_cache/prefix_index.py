"""Which page holds a block of tokens: found by a hash of the block and of all that stands before it."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

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
