"""The store of keys and values: what it holds, gives back, and takes of memory."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from accel_kernels import paged_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.llm.kv_cache.row_blocks import RowBlocks
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.kv_cache.store import AHEAD, RowSelection, Store
from support.everything import EVERYTHING
from support.llm.kv_cache.row_lists import SHAPES, STORED, Lists, append, append_as_stock, check, filled, fresh
from support.noted import noted

number = st.integers(0, 2**16)
step = st.one_of(
    st.tuples(st.sampled_from(["append", "stock"]), st.sampled_from([1, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 150])),
    st.tuples(st.just("reorder"), st.lists(number, min_size=8, max_size=8)),
    st.tuples(st.just("crop"), st.sampled_from([0, 1, 2, 5, BLOCK, BLOCK + 3, 200])),
    st.tuples(st.sampled_from(["fork", "pickle", "read", "forget"]), st.none()),
    st.tuples(st.just("select"), st.lists(number, min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("grow"), st.integers(1, 300)),
    st.tuples(st.just("mask"), st.integers(0, 2**8 - 1)),
)


@pytest.mark.parametrize("stored", STORED)
@settings(deadline=None, derandomize=True, max_examples=150 if EVERYTHING else 75)
@given(rows=st.integers(1, 4), wanted=st.sampled_from([0, 90, 500]), steps=st.lists(step, min_size=3, max_size=14))
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_a_store_is_a_list_of_tensors_a_row(stored, rows, wanted, steps):
    torch.manual_seed(0)
    shapes = STORED[stored]
    store, lists, forked = Store(shapes, wanted), Lists(rows, shapes), []
    for name, what in [("append", 5), *steps]:
        rows = len(lists.rows)
        if name in ("append", "stock"):
            new = fresh(rows, what, shapes)
            (append if name == "append" else append_as_stock)(store, new)
            lists.append(new)
        elif name == "crop":
            lists.crop(max(0, lists.length - what))
            store.crop(lists.length)
        elif name == "reorder" and lists.length:
            index = [i % rows for i in what[:rows]]
            addresses = store.metadata[1:].tolist()
            store.choose(RowSelection("reorder", torch.tensor(index)))
            assert store.metadata[1:].tolist() == addresses
            lists.choose(index)
        elif name == "select" and lists.length:
            index = [i % rows for i in what]
            store.choose(RowSelection("select", index))
            lists.choose(index)
        elif name == "repeat" and lists.length and rows * what <= 8:
            store.choose(RowSelection("repeat", what))
            lists.choose([r for r in range(rows) for _ in range(what)])
        elif name == "grow":
            store.reserve(rows, lists.length + what)
        elif name == "mask":
            tokens = min(lists.length, what % 6)
            store.reserve(rows, lists.length + 1)
            lists.seen = [torch.tensor([what >> (r + t) & 1 > 0 for t in range(tokens)]).bool() for r in range(rows)]
            store.set_padding_mask(torch.stack(lists.seen).to([torch.int64, torch.bool][what % 2]))
        elif name == "forget" and store.blocks:
            store.set_padding_mask(None)
            lists.seen = [seen[:0] for seen in lists.seen]
        elif name == "fork":
            forked.append((store, copy.deepcopy(lists)))
            store = copy.deepcopy(store)
        elif name == "pickle":
            store = pickle.loads(pickle.dumps(store))
        elif name == "read" and store.blocks:
            for layer in range(len(shapes)):
                kept = torch.stack(store.read(layer))
                assert torch.equal(kept.transpose(2, 3), lists.stacked(layer)) or not lists.length
        check(store, lists)
    for store, lists in forked:
        check(store, lists)


def test_beams_share_full_blocks_and_copy_the_one_being_written():
    store, _ = filled()
    before = store.blocks.kv(0).keys.clone()
    store.choose(RowSelection("reorder", torch.tensor([1, 1, 3, 0])))
    assert store.blocks.kv(0).table[:, :2].tolist() == [[3, 4], [3, 4], [9, 10], [0, 1]]
    changed = (store.blocks.kv(0).keys != before).flatten(1).any(1)
    assert set(changed.nonzero().flatten().tolist()) <= {2, 5, 8, 11}


def test_nothing_is_copied_where_a_block_ends():
    store, _ = filled(tokens=2 * BLOCK)
    before = [tensor.clone() for kept in store.blocks.by_shape.values() for tensor in kept]
    store.choose(RowSelection("reorder", torch.tensor([1, 1, 3, 0])))
    after = [tensor for kept in store.blocks.by_shape.values() for tensor in kept]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("reordered", [True, False])
def test_a_layer_behind_the_others_writes_what_is_its_rows_own(reordered):
    store, lists = filled(tokens=3 * BLOCK)
    store.choose(RowSelection("reorder", torch.tensor([1, 2, 0, 0])))
    lists.choose([1, 2, 0, 0])
    store.shorten(1, BLOCK + 5)
    assert not store.consistent
    if reordered:
        store.choose(RowSelection("reorder", torch.tensor([1, 2, 0, 0])))
        lists.choose([1, 2, 0, 0])
    again = fresh(4, BLOCK + 5)[1]
    store.write(1, *again.transpose(2, 3))
    for r, row in enumerate(lists.rows):
        row[1] = torch.cat([row[1][:, : 2 * BLOCK - 5], again[:, r]], 1)
    check(store, lists)


def test_another_number_of_rows_is_refused_until_the_store_is_empty():
    store, _ = filled(rows=2)
    with pytest.raises(ValueError, match="a cache of 2 rows, used with 3"):
        store.reserve(3, 500)
    store.crop(0)
    store.reserve(3, 5)
    assert store.rows == 3


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_may_be_left_or_entered_at_any_point(inside):
    with torch.inference_mode(inside):
        store, lists = filled()
        store.set_padding_mask(torch.ones(4, 3))
        copies = [(store, lists)]
        for made in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
            copies.append((made, copy.deepcopy(lists)))
    for mode in (not inside, inside, not inside):
        with torch.inference_mode(mode):
            for store, lists in copies:
                append(store, new := fresh(4, 100))
                lists.append(new)
                store.choose(RowSelection("reorder", torch.tensor([1, 1, 3, 0])))
                lists.choose([1, 1, 3, 0])
                store.crop(80)
                lists.crop(80)
                store.set_padding_mask(torch.ones(4, 3))
                check(store, lists)


@pytest.mark.parametrize("more", [{}, {"window": 50}, {"softcap": 3.0}])
def test_attention_over_shared_blocks_is_attention_over_the_rows_own_tokens(more):
    store, lists = filled(tokens=BLOCK + 9)
    mask = torch.arange(BLOCK + 9) >= torch.arange(4).view(-1, 1)
    store.set_padding_mask(mask)
    lists.seen = list(mask)
    for index in ([1, 1, 3, 0], [0, 2, 2, 3]):
        store.choose(RowSelection("reorder", torch.tensor(index)))
        lists.choose(index)
        new, q = fresh(4, 60), torch.randn(4, 60, 4, 4)
        plain = Store(SHAPES)  # the rows' own tokens, never reordered
        append(plain, [lists.stacked(layer) for layer in range(len(SHAPES))])
        outputs = []
        for one in (store, plain):
            one.reserve(4, lists.length + 60)
            one.set_padding_mask(lists.padding_mask(lists.length))
            outputs.append(paged_attention.reference(q, *new[0], one.kvs([0], 60)[0], 0.5, **more))
        assert torch.equal(*outputs)
        for layer in (1, 2):
            kv = store.kvs([layer], 60)[layer]
            kv.keys[kv.slots(kv.stored(), kv.stored() + 60)] = new[layer][0]
            kv.values[kv.slots(kv.stored(), kv.stored() + 60)] = new[layer][1]
        store.advance(60)
        lists.append(new)
        check(store, lists)


def test_a_request_has_room_at_once_but_not_for_all_it_might_come_to():
    store = Store(SHAPES, expected_tokens=1000)
    store.reserve(1, 100)
    assert 1000 <= store.capacity <= 1000 + 2 * BLOCK
    store = Store(SHAPES, expected_tokens=10**6)
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
    memory(store.blocks.by_shape[SHAPES[1]][0].nbytes * 2)  # the larger shape fails second
    store.choose(RowSelection("reorder", torch.tensor([1, 1, 0, 2])))
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
    store = Store(SHAPES[1:2], expected_tokens=16000)
    store.reserve(1, 100)
    assert 100 <= store.capacity <= 1024


def test_what_could_not_be_allocated_is_freed_before_less_is_tried_and_before_the_error_is_handled(memory, monkeypatch):
    alive, original = [], RowBlocks.__init__

    def watched(self, *args):
        assert not any(one() is not None for one in alive)
        alive.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(RowBlocks, "__init__", watched)
    memory(SHAPES[1].size * 1024)
    gc.disable()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            try:
                Store(SHAPES, expected_tokens=16000).reserve(1, 2000)
            except torch.OutOfMemoryError:
                assert len(alive) > 2 and not any(one() is not None for one in alive)
                raise
    finally:
        gc.enable()


def test_a_copy_is_no_larger_than_what_it_holds():
    store, _ = filled(rows=1, tokens=100, expected_tokens=10000)
    assert len(pickle.dumps(store)) < 4 * sum(shape.size for shape in SHAPES) * 2 * BLOCK
    assert copy.deepcopy(store).capacity == 2 * BLOCK


def test_room_grows_by_shares_so_that_a_long_text_is_copied_a_few_times_only(monkeypatch):
    """Nobody says how long the text will be: each time it is full, the store takes half as much again."""
    sizes = noted(monkeypatch, Store, "_lay_out", lambda self, rows, tokens, chosen=None: tokens)
    store = Store(SHAPES)
    for tokens in range(1, 40 * BLOCK):
        store.reserve(1, tokens)
        store.advance(1)
    assert store.capacity >= 40 * BLOCK - 1
    assert 3 < len(sizes) < 12, sizes  # one for every block would be 40
