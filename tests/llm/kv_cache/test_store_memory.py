"""The memory of the store: how it grows, what happens where there is none, when it is free again."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from accel.llm.kv_cache.blocks import BLOCK, Blocks, Shape
from accel.llm.kv_cache.store import AHEAD, Store
from support.llm.kv_cache.row_lists import CPU, SHAPES, append, check, filled, fresh


def test_room_is_what_was_asked_for_then_half_as_much_again():
    store = Store(SHAPES)
    store.reserve(1, 100)
    assert store.capacity == 2 * BLOCK
    store.reserve(1, 129)
    assert store.capacity == 3 * BLOCK
    store.reserve(1, 900)
    assert store.capacity == 15 * BLOCK


def test_a_request_has_room_at_once_but_not_for_all_it_might_come_to():
    store = Store(SHAPES, wanted=1000)
    store.reserve(1, 100)
    assert 1000 <= store.capacity <= 1000 + 2 * BLOCK
    store = Store(SHAPES, wanted=10**6)
    store.reserve(1, 100)
    assert AHEAD + 100 <= store.capacity <= AHEAD + 100 + BLOCK


@pytest.fixture
def memory(monkeypatch):
    """An allocator that has only so many bytes for one tensor; memory(bytes) sets it."""
    limit, make = [None], torch.empty

    def empty(*size, **kwargs):
        tensor = make(*size, **kwargs)
        if limit[0] is not None and tensor.nbytes > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    return lambda limit_of_one: limit.__setitem__(0, limit_of_one)


def test_no_memory_to_grow_says_so_and_leaves_the_store_as_it_was(memory):
    store, lists = filled(tokens=100)
    memory(store.blocks.kept[SHAPES[1]][0].nbytes * 2)  # the larger shape fails second
    store.reorder(torch.tensor([1, 1, 0, 2]))
    lists.choose([1, 1, 0, 2])
    with pytest.raises(torch.OutOfMemoryError, match=r"10000 tokens in 4 rows: .* GiB wanted; the 100 stored are kept"):
        store.reserve(4, 10000)
    check(store, lists)
    append(store, new := fresh(4, 3))
    lists.append(new)
    check(store, lists)
    memory(None)
    append(store, new := fresh(4, 1000))
    lists.append(new)
    check(store, lists)


def test_no_memory_for_what_a_request_may_come_to_is_no_error(memory):
    memory(SHAPES[1].size * 1024)
    store = Store(SHAPES[1:2], wanted=16000)
    store.reserve(1, 100)
    assert 100 <= store.capacity <= 1024


def test_what_could_not_be_allocated_is_freed_before_less_is_tried_and_before_the_error_is_handled(memory, monkeypatch):
    alive, original = [], Blocks.__init__

    def watched(self, *args):
        assert not any(one() is not None for one in alive)
        alive.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(Blocks, "__init__", watched)
    memory(SHAPES[1].size * 1024)
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            try:
                Store(SHAPES, wanted=16000).reserve(1, 2000)
            except torch.OutOfMemoryError:
                assert len(alive) > 2 and not any(one() is not None for one in alive)
                raise
    finally:
        gc.enable()


def test_a_copy_is_no_larger_than_what_it_holds():
    store, _ = filled(rows=1, tokens=100, wanted=10000)
    assert len(pickle.dumps(store)) < 4 * sum(shape.size for shape in SHAPES) * 2 * BLOCK
    assert copy.deepcopy(store).capacity == 2 * BLOCK


def test_eight_bits_are_a_byte_an_element_and_four_a_scale():
    shape = Shape(8, 128, torch.bfloat16, CPU, torch.int8)
    assert shape.size == 2 * 8 * (128 + 4) and shape.exact.size == 2 * 8 * 128 * 2
    store = Store((shape,) * 3)
    store.reserve(2, 2 * BLOCK)
    assert sum(kept.nbytes for kept in store.blocks.kept[shape]) == 3 * shape.size * 2 * 2 * BLOCK


def test_a_dropped_store_is_gone_at_once():
    gc.disable()
    try:
        store, _ = filled()
        store.reorder(torch.tensor([1, 1, 3, 0]))
        held = [weakref.ref(tensor) for tensor in store.tensors()]
        del store
        assert all(one() is None for one in held)
    finally:
        gc.enable()


def test_room_grows_by_shares_so_that_a_long_text_is_copied_a_few_times_only(monkeypatch):
    """Nobody says how long the text will be: each time it is full, the store takes half as much again."""
    sizes, lay_out = [], Store._lay_out

    def counted(self, rows, tokens, chosen=None):
        sizes.append(tokens)
        lay_out(self, rows, tokens, chosen)

    monkeypatch.setattr(Store, "_lay_out", counted)
    store = Store(SHAPES)
    for tokens in range(1, 40 * BLOCK):
        store.reserve(1, tokens)
        store.advance(1)
    assert store.capacity >= 40 * BLOCK - 1
    assert 3 < len(sizes) < 12, sizes  # one for every block would be 40
