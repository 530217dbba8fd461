"""States have two halves: a forward may be repeated or taken back, and in whichever half states lie, they are kept."""

import copy
import pickle

import pytest
import torch
from accel_kernels.attention.paged.kv import HALF

from accel.llm.kv_cache.shape import BLOCK
from accel.llm.kv_cache.store import RowSelection, Store
from support.llm.kv_cache.row_states import KINDS, forward, poisoned, same_states, states_in, write

REFUSED = {  # by what came after the forward that is to be taken back, which of its rows there are then
    "reorder": [1, 0],
    "select": [1],
    "repeat": [0, 0, 1, 1],
    "copied": [0, 1],
    "pickled": [0, 1],
    "grown": [0, 1],
    "forward": [0, 1],
    "written": [0, 1],
    "cropped": [0, 1],
}


def follows(store, before, new, index=slice(None)) -> None:
    """The store is behind one more forward with these values, rows index of it behind what was kept before."""
    for layer, (inputs, state) in states_in(store).items():
        window, last = before[layer]
        given, added = new[layer]
        assert state is None or torch.equal(state, last[index] / 2 + added)
        assert inputs is None or torch.equal(inputs, torch.cat([window[index], given], 2)[:, :, -inputs.shape[2] :])
        assert store.metadata_on(store.shapes[layer].device)[HALF] == store.blocks.half


@pytest.mark.parametrize("change", [None, *REFUSED])
@pytest.mark.parametrize(("forwards", "tokens"), [(1, 1), (2, 3), (2, BLOCK + 1), (3, 2)])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_last_forward_is_taken_back_where_nothing_came_after_it(kind, forwards, tokens, change):
    store = Store(kind)
    for _ in range(forwards):
        store.reserve(2, store.length + 2)
        if not store.length:
            poisoned(store)
        write(store, 2)
    before, length = states_in(store), store.length
    store.reserve(2, length + tokens)
    new = forward(store, tokens)
    forward(store, tokens)  # with other values, which are not wanted
    same_states(store, before)
    write(store, tokens, new)
    follows(store, before, new)
    after = states_in(store)
    if change is None:
        store.crop(length)
        assert store.length == length and store.consistent
        same_states(store, before)
        with pytest.raises(RuntimeError, match="does not track past states"):
            store.crop(length - 1)
        store.reserve(2, length + tokens)
        write(store, tokens, new)
        same_states(store, after)
        return
    index = REFUSED[change]
    if change in ("reorder", "select", "repeat"):
        what = {"reorder": torch.tensor(index), "select": index, "repeat": 2}[change]
        store.choose(RowSelection(change, what))
    elif change in ("copied", "pickled"):
        store = copy.deepcopy(store) if change == "copied" else pickle.loads(pickle.dumps(store))
    elif change == "written":
        for layer, several in after.items():
            store.write_state(layer, *several)
    elif change == "cropped":
        store.crop(store.length)
    else:
        store.reserve(2, 4 * BLOCK if change == "grown" else store.length + 1)
        if change == "forward":
            forward(store, 1)
    with pytest.raises(RuntimeError, match="does not track past states"):
        store.crop(length)
    assert store.length == length + tokens
    same_states(store, after, index)
    store.reserve(len(index), store.length + 1)
    new = forward(store, 1)
    same_states(store, after, index)
    write(store, 1, new)
    follows(store, after, new, index)
