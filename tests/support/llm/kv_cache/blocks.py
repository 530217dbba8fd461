"""Whether every block and every slot of an allocator is accounted for."""

import numpy as np

from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.state_slots import StateSlots


def check_blocks(pool: BlockAllocator) -> None:
    """Raises AssertionError unless every block and slot is accounted for exactly once. It looks at everything."""
    columns = np.arange(pool.table.shape[2])
    there = (pool.first[:, :, None] <= columns) & (columns < pool.held[:, None])
    assert np.array_equal(pool.table > 0, there), "a row holds other columns than it should"
    assert (pool.first <= pool.held).all() and (pool.committed <= pool.held).all()
    assert not pool.held[~pool.opened].any() and not pool.first[:, ~pool.opened].any()
    assert not pool.first[[one.window is None for one in pool.sets]].any(), "given back without a window"
    places, _, at = np.nonzero(pool.table)
    blocks = pool.table[pool.table > 0]
    assert np.array_equal(pool.references, np.bincount(blocks, minlength=pool.blocks)), "references are miscounted"
    uses = np.unique(np.stack([blocks, places, at], 1), axis=0)
    assert len(np.unique(blocks)) == len(uses), "a block serves two sets or two places"
    every = [*pool.unused, *pool.cached, *np.unique(blocks).tolist()]
    assert sorted(every) == list(range(1, pool.blocks)), "a block is lost, or is there twice"
    assert all(block in pool.index for block in pool.cached)
    assert not any(block in pool.index for block in pool.unused)
    found = [(block, (p, one)) for p, by_digest in enumerate(pool.index.blocks) for one, block in by_digest.items()]
    assert len(found) == len(pool.index.entries) and dict(found) == pool.index.entries
    if pool.states is not None:
        check_slots(pool.states, np.flatnonzero(pool.opened))


def check_slots(states: StateSlots, rows: np.ndarray) -> None:
    """The same of slots for states. rows: that are open."""
    held = [*states.current[rows].tolist(), *states.spare[rows].tolist(), *states.kept.values()]
    assert np.array_equal(states.references, np.bincount(held, minlength=len(states.references)))
    assert sorted(states.unused) == np.flatnonzero(states.references == 0).tolist(), "a slot is lost, or free twice"
