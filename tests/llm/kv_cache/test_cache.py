"""A DynamicCache over the store beside a stock one: everything its users may do, called through transformers."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from accel.llm.kv_cache.cache import adopt, store_of
from accel.llm.kv_cache.shape import BLOCK
from support.llm.kv_cache.cache_pairs import CPU, LATENTS, SHAPES, feed, feed_fast, fresh, pair, same
from support.noted import OperationCount

number = st.integers(0, 2**16)
step = st.one_of(
    st.tuples(st.sampled_from(["stock", "fast"]), st.sampled_from([1, 1, 3, BLOCK, BLOCK + 1])),
    st.tuples(st.just("reorder"), st.lists(number, min_size=8, max_size=8)),
    st.tuples(st.just("reorder one"), st.lists(number, min_size=8, max_size=8)),
    st.tuples(st.just("crop"), st.sampled_from([0, -1, -3, -BLOCK, -500])),
    st.tuples(st.just("crop one"), st.sampled_from([-1, -2])),
    st.tuples(st.just("select"), st.lists(number, min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.sampled_from(["deepcopy", "pickle", "edit", "assign", "reset", "adopt"]), st.none()),
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(rows=st.integers(1, 4), steps=st.lists(step, min_size=3, max_size=14), shapes=st.sampled_from([SHAPES, LATENTS]))
@pytest.mark.turns(2)
def test_a_schedule_of_calls_leaves_what_it_leaves_in_a_stock_cache(rows, steps, shapes):
    torch.manual_seed(0)
    (ours, stock), first = pair(shapes), rows
    forked = []
    for name, what in [("fast", 5), *steps]:
        length = stock.get_seq_length()
        if not length:
            rows = stock.layers[0].keys.shape[0] if stock.layers and stock.layers[0].keys is not None else first
        if name in ("stock", "fast"):
            if name == "fast" and isinstance(adopt(ours, shapes), str):
                name = "stock"
            (feed if name == "stock" else feed_fast)(ours, stock, rows, what, shapes)
        elif name == "reorder":
            index = torch.tensor([i % rows for i in what[:rows]])
            for cache in (ours, stock):
                cache.reorder_cache(index)
        elif name == "reorder one" and length:
            index = torch.tensor([i % rows for i in what[:rows]])
            for cache in (ours, stock):
                cache.layers[1].reorder_cache(index)
        elif name == "crop":
            for cache in (ours, stock):
                cache.crop(what)
        elif name == "crop one":
            if length > 2:  # and then the others: in between, layers differ
                for cache in (ours, stock):
                    cache.layers[1].crop(what)
                same(ours, stock)
                for cache in (ours, stock):
                    for layer in (0, 2):
                        cache.layers[layer].crop(what)
        elif name == "select" and length:
            index = torch.tensor([i % rows for i in what])
            for cache in (ours, stock):
                cache.batch_select_indices(index)
            rows = len(what)
        elif name == "repeat" and length and rows * what <= 8:
            for cache in (ours, stock):
                cache.batch_repeat_interleave(what)
            rows *= what
        elif name == "deepcopy":
            forked.append((ours, copy.deepcopy(stock)))
            ours = copy.deepcopy(ours)
        elif name == "pickle":
            ours = pickle.loads(pickle.dumps(ours))
        elif name == "edit" and length:
            for cache in (ours, stock):
                cache.layers[2].values[:, :, -1] += 1
        elif name == "assign" and length > 4:
            for cache in (ours, stock):
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, :-2] * 2, layer.values[:, :, :-2] - 1
        elif name == "reset":
            ours.reset()  # stock layers keep zeros in some versions
            ours, stock, first = ours if store_of(ours) else pair(shapes)[0], DynamicCache(), rows % 4 + 1
        elif name == "adopt":
            assert not isinstance(adopt(ours, shapes), str)
        same(ours, stock)
    for ours, stock in forked:
        same(ours, stock)


@pytest.mark.parametrize("rows", [2, 3])
def test_layers_asked_apart_meet_again(rows):
    ours, stock = pair()
    feed_fast(ours, stock, 3, 70)
    index = torch.arange(rows).flip(0)
    for layer in range(3):
        for cache in (ours, stock):
            cache.layers[layer].batch_select_indices(index)
            cache.layers[layer].batch_repeat_interleave(2)
        assert (store_of(ours) is not None) == (layer == 2)
    feed(ours, stock, 2 * rows, 1)
    assert store_of(ours)


def test_a_layer_read_before_the_others_were_asked_shows_what_it_was_asked_for():
    ours, stock = pair()
    feed_fast(ours, stock, 3, 70)
    for layer in range(3):
        for cache in (ours, stock):
            cache.layers[layer].batch_repeat_interleave(2)
            cache.layers[layer].keys[:, :, -1] = 0
        same(ours, stock)
    feed_fast(ours, stock, 6, 1)
    same(ours, stock)
    assert store_of(ours)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_autocast_or_a_backward_pass_brings_is_kept_as_stock_keeps_it(gradients):
    ours, stock = pair()
    feed_fast(ours, stock, 2, 5)
    with torch.set_grad_enabled(gradients):
        for layer, pair_ in enumerate(fresh(2, 1)):
            keys, values = pair_.requires_grad_() if gradients else pair_.bfloat16()
            mine, theirs = ours.update(keys, values, layer), stock.update(keys, values, layer)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mine, theirs, strict=True))
            assert mine[0].requires_grad == gradients
    assert not store_of(ours)
    same(ours, stock)


def test_a_new_batch_needs_an_empty_cache():
    ours, stock = pair()
    feed(ours, stock, 2, 5)
    ours.reset()
    assert ours.get_seq_length() == 0 and not ours.is_initialized
    feed(ours, DynamicCache(), 3, 5)
    assert ours.layers[2].keys.shape == (3, 2, 5, 4)
    with pytest.raises(RuntimeError):
        ours.update(*fresh(2, 1)[0], 0)
    assert ours.layers[0].keys.shape == (3, 2, 5, 4)


def test_an_update_without_memory_leaves_all_layers_as_they_were(monkeypatch):
    ours, stock = pair()
    feed(ours, stock, 2, 60)

    def full(*size, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError, match="70 tokens in 2 rows"):
        patch.setattr(torch, "empty", full)
        ours.update(*fresh(2, 10)[0], 0)
    same(ours, stock)
    feed(ours, stock, 2, 10)
    assert store_of(ours)


def test_recording_of_the_past_changes_nothing():
    ours, stock = pair()
    feed(ours, stock, 1, 5)
    for cache in (ours, stock):
        cache.activate_past_recording()
    feed(ours, stock, 1, 4)
    for cache in (ours, stock):
        cache.crop(0)
        cache.crop(torch.tensor(-3))
    same(ours, stock)
    assert store_of(ours)


def test_a_crop_by_a_tensor_reads_it_once():
    """Not once a layer, as it waits for the GPU each time; and what it holds now."""
    ours, stock = pair()
    feed(ours, stock, 1, 20)
    with torch.inference_mode():
        unversioned = torch.tensor(-1)
    number = torch.tensor(-3)
    for crop in (number, number, unversioned, number.clone(), torch.tensor(0)):
        with OperationCount(lambda one: one is torch.ops.aten._local_scalar_dense.default) as reads:
            ours.crop(crop)
        stock.crop(crop)
        same(ours, stock)
        assert reads.count <= 1 or crop is unversioned
        if crop is number:
            number -= 1
    assert store_of(ours)


def test_a_positive_crop_is_what_this_version_of_transformers_makes_of_it():
    ours, stock = pair()
    feed(ours, stock, 1, 9)
    for length in (20, 4):
        outcomes = []
        for cache in (ours, stock):
            try:
                cache.crop(length)
                outcomes.append(None)
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        same(ours, stock)


def test_early_initialization_and_saving():
    ours, stock = pair()
    ours.early_initialization(2, [2, 1, 2], [4, 6, 4], torch.float32, CPU)  # the second layer is of another dtype
    assert ours.is_initialized and ours.get_seq_length() == 0
    ours.reset()
    assert ours.layers[0].keys is None and not ours.is_initialized
    ours, stock = pair()
    feed(ours, stock, 2, 5)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    same(torch.load(file, weights_only=False), stock)
    again = DynamicCache([(keys, values) for keys, values, *_ in ours])
    same(again, stock)


def test_a_cache_without_its_last_token_is_begun():
    ours, stock = pair()
    feed(ours, stock, 2, 5)
    for one in (ours, stock):
        one.crop(-5)
        assert one.is_initialized and one.get_seq_length() == 0 and one.layers[0].keys.shape == (2, 2, 0, 4)


def test_a_dropped_cache_frees_everything_at_once():
    gc.disable()
    try:
        ours, stock = pair()
        feed(ours, stock, 2, 70)
        store = store_of(ours)
        held = [weakref.ref(store), *map(weakref.ref, store.tensors())]
        del store
        copied = copy.deepcopy(ours)
        del ours
        assert all(one() is None for one in held)
        same(copied, stock)
    finally:
        gc.enable()
