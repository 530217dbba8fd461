"""Which full blocks, and which states behind them, begin with which tokens."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

from accel.llm.kv_cache.layer_sets import LayerSet
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.kv_cache.state_slots import StateSlots


def block_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block of token ids that follows the block with the hash `before`, empty for the first block.

    BLAKE2b of 128 bits, so collisions do not occur. Raises ValueError for a negative id, a token not known yet.
    """
    if min(tokens) < 0:
        raise ValueError(f"token ids from 0 on have a hash, not {min(tokens)}")
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """Full blocks by set and hash. A block has one hash at most, a hash one block of each set.

    states: by the same hashes, where layers keep some: without its states no block is found.
    """

    def __init__(self, sets: Sequence[LayerSet], states: StateSlots | None = None):
        self.sets, self.states = tuple(sets), states
        self.blocks: list[dict[bytes, int]] = [{} for _ in sets]
        self.entries: dict[int, tuple[int, bytes]] = {}  # by block: set and hash
        # A hit goes only as far as a set without window knows every hash; 0 where all have windows.
        self.whole = next((place for place, one in enumerate(self.sets) if one.window is None), None)

    def __contains__(self, block: int) -> bool:
        return block in self.entries

    def add(self, place: int, digest: bytes, block: int) -> None:
        """The block of set `place` has this hash, unless another block has it already."""
        if digest not in self.blocks[place]:
            self.blocks[place][digest] = block
            self.entries[block] = place, digest

    def remove(self, block: int) -> None:
        place, digest = self.entries.pop(block)
        del self.blocks[place][digest]
        if self.states is not None:
            self.states.drop(digest)

    def clear(self) -> None:
        if self.states is not None:
            self.states.forget()
        self.entries.clear()
        for blocks in self.blocks:
            blocks.clear()

    def known(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of full first blocks, as far as sets without a window hold them, or of all; a token is left over."""
        digests: list[bytes] = []
        for column in range((len(tokens) - 1) // BLOCK if self.entries else 0):
            digest = block_digest(digests[-1] if digests else b"", tokens[column * BLOCK : (column + 1) * BLOCK])
            if self.whole is not None and digest not in self.blocks[self.whole]:
                break
            digests.append(digest)
        return digests

    def prefix(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the longest cached run of full blocks at the beginning of these tokens.

        Every set must hold the blocks that later tokens see, and the states behind the last block must be kept, where
        there are any. At least one token is left to compute.
        """
        digests = self.known(tokens)
        # How many columns in a row each set holds, up to and with each column.
        runs = [
            list(accumulate((digest in blocks for digest in digests), lambda run, held: (run + 1) * held, initial=0))
            for blocks in self.blocks
        ]
        for columns in range(len(digests), 0, -1):
            if self.states is not None and digests[columns - 1] not in self.states:
                continue
            needed = (columns - one.first_seen(columns * BLOCK) for one in self.sets)
            if all(run[columns] >= need for run, need in zip(runs, needed, strict=True)):
                return digests[:columns]
        return []
