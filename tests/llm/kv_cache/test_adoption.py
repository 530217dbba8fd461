"""A DynamicCache is taken over by the store, with what it holds; what is not says why."""

import copy

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from accel.llm.kv_cache.cache import StoreLayer, adopt, store_of
from support.llm.kv_cache.cache_pairs import SHAPES, feed, filled, fresh, same


def test_an_empty_cache_is_taken_over_in_place_and_allocates_nothing():
    cache = DynamicCache()
    layers = cache.layers
    store = adopt(cache, SHAPES, expected_tokens=500)
    assert type(cache) is DynamicCache and cache.layers is layers and len(cache) == 3
    assert store.expected_tokens == 500 and store.blocks is None and store_of(cache) and store_of(cache) is store
    assert adopt(cache, SHAPES) is store and store.expected_tokens == 500
    assert cache.get_seq_length() == 0 and not cache.is_initialized and not cache.is_compileable
    assert cache.layers[0].keys is None and cache.get_mask_sizes(7, 1) == (7, 0) and cache.get_max_length() == -1
    assert cache.is_sliding == [False] * 3 and cache.is_croppable


@pytest.mark.parametrize("window", [None, 20])
def test_a_filled_cache_is_taken_over_with_what_it_holds(window):
    make = DynamicLayer if window is None else lambda: DynamicSlidingWindowLayer(window)
    stock = DynamicCache()
    stock.layers = [make() for _ in SHAPES]
    for layer, (keys, values) in enumerate(fresh(2, 15)):
        stock.update(keys, values, layer)
    ours = copy.deepcopy(stock)
    assert not isinstance(adopt(ours, SHAPES), str) and store_of(ours)
    same(ours, stock)
    feed(ours, stock, 2, 3)


def dropping(cache, which=slice(None)):
    for layer in cache.layers[which]:
        layer.keys, layer.values = (torch.cat([t[:, :, :2], t[:, :, 4:]], 2) for t in (layer.keys, layer.values))


def recorded(cache):
    cache.activate_past_recording()
    for layer, (keys, values) in enumerate(fresh_of(cache)):
        cache.update(keys, values, layer)
    cache.crop(-2)


def fresh_of(cache):
    return [torch.ones(2, cache.layers[0].keys.shape[0], s.heads, 3, s.dim, dtype=s.dtype) for s in SHAPES]


EDITS = {
    "tokens of all layers": dropping,
    "tokens of one layer": lambda cache: dropping(cache, slice(1, 2)),
    "numbers in place": lambda cache: [layer.keys.mul_(2) for layer in cache.layers],
    "rows selected": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "rows reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "rows of one layer": lambda cache: cache.layers[1].reorder_cache(torch.tensor([1, 1])),
    "a device and back": lambda cache: [setattr(layer, "keys", layer.keys.cpu()) for layer in cache.layers],
    "recorded and cropped": recorded,
    "nothing": lambda cache: None,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tokens", [3, 7])
@pytest.mark.share(1)
def test_a_cache_with_a_sliding_window_is_edited_as_stocks_own(edit, tokens):
    ours, stock = (DynamicCache() for _ in range(2))
    for cache in (ours, stock):
        cache.layers = [DynamicSlidingWindowLayer(5) for _ in SHAPES]
    adopt(ours, SHAPES)
    feed(ours, stock, 2, tokens)
    assert store_of(ours) and ours.is_sliding == stock.is_sliding
    for cache in (ours, stock):
        EDITS[edit](cache)
    same(ours, stock)
    feed(ours, stock, stock.layers[0].keys.shape[0], 1)
    same(ours, stock)
    for mine, theirs in zip(ours.layers, stock.layers, strict=True):
        assert isinstance(mine, type(theirs)) and mine.cumulative_length == theirs.cumulative_length
        assert torch.equal(mine.values, theirs.values) and mine.record_past == theirs.record_past
        if isinstance(mine, StoreLayer):
            mine.leave()
        assert type(mine) is type(theirs) and vars(mine).keys() == vars(theirs).keys()
    feed(ours, stock, stock.layers[0].keys.shape[0], 2)
    same(ours, stock)


class Subclass(DynamicCache):
    pass


class OtherLayer(DynamicLayer):
    pass


def edited(cache, edit) -> DynamicCache:
    edit(cache)
    return cache


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "another kind: NoneType"),
        (lambda: ((torch.ones(1), torch.ones(1)),), "another kind: tuple"),
        (lambda: StaticCache(LlamaConfig(num_hidden_layers=3), max_cache_len=20), "another kind: StaticCache"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "another kind: EncoderDecoderCache"),
        (Subclass, "another kind: Subclass"),
        (lambda: edited(DynamicCache(), lambda cache: setattr(cache, "offloading", True)), "offloaded"),
        (lambda: filled(layers=[OtherLayer() for _ in SHAPES]), "a cache layer of another kind: OtherLayer"),
        (lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=4)), "another number of layers"),
        (lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=2)), "another number of layers"),
        (lambda: edited(filled(), lambda cache: cache.layers[1].crop(-2)), "different lengths"),
        (
            lambda: edited(filled(), lambda cache: cache.layers[2].batch_select_indices(torch.tensor([0]))),
            "different batch sizes",
        ),
        (lambda: filled(layers=[DynamicSlidingWindowLayer(10) for _ in SHAPES]), "sliding window has dropped tokens"),
        (lambda: DynamicCache([(k.float(), v.float()) for k, v in fresh(1, 2)]), "another dtype"),
        (lambda: edited(filled(), lambda cache: cache.layers[1].values.requires_grad_()), "gradients"),
    ],
)
def test_what_is_not_taken_over_says_why_and_stays_as_it_is(make, reason):
    cache = make()
    layers = list(getattr(cache, "layers", ()))
    assert reason in adopt(cache, SHAPES)
    assert not store_of(cache) and list(getattr(cache, "layers", ())) == layers


def test_a_cache_stays_as_it_is_where_there_is_no_memory_to_take_it_over(monkeypatch):
    cache = filled()
    kept = [layer.keys for layer in cache.layers]

    def full(*size, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    assert adopt(cache, SHAPES) == "no memory to take the cache over"
    assert all(layer.keys is keys for layer, keys in zip(cache.layers, kept, strict=True))
