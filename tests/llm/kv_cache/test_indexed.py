"""A layer with index keys beside latents: what is done to a cache is done to both, as in stock."""

import copy
import pickle

import pytest
import torch

from accel.libraries.cache import DynamicCache, DynamicIndexedLayer
from accel.llm.kv_cache.cache import adopt, store_of
from accel.llm.kv_cache.indexed_layer import IndexedStoreLayer
from accel.llm.kv_cache.shape import LatentShape

pytestmark = pytest.mark.skipif(
    not hasattr(DynamicIndexedLayer(), "indexer_position_ids"),
    reason="before 5.24 models with an index keep no latents",
)
SHAPES = (LatentShape(16, 8, 4, torch.float32, torch.device("cpu")),) * 2
CHANGES = {
    "crop": lambda cache: cache.crop(-2),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "copied": copy.deepcopy,
}


def filled(cache: DynamicCache, tokens: int = 5, seed: int = 0, rows: int = 2) -> DynamicCache:
    numbers = torch.Generator().manual_seed(seed)
    for place, layer in enumerate(cache.layers):
        keys, values, index = (torch.randn(rows, tokens, n, generator=numbers) for n in (16, 8, 12))
        layer.update(keys.unsqueeze(1), values.unsqueeze(1))
        if place == 0:  # the second layer sees what the first has chosen
            layer.update_indexer(index)
    return cache


def stock_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicIndexedLayer(), DynamicIndexedLayer()]
    return cache


def held(cache: DynamicCache) -> list[torch.Tensor | None]:
    return [t for layer in cache.layers for t in (layer.keys, layer.values, layer.indexer_keys)]


def assert_same(ours: DynamicCache, stock: DynamicCache) -> None:
    assert ours.get_seq_length() == stock.get_seq_length()
    for mine, theirs in zip(held(ours), held(stock), strict=True):
        assert theirs is None or not theirs.numel() or torch.equal(mine, theirs)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_of_both(change, begun):
    stock, ours = filled(stock_cache()), stock_cache()
    if begun:
        filled(ours)
    assert not isinstance(adopt(ours, SHAPES), str)
    if not begun:
        filled(ours)
    assert {type(layer) for layer in ours.layers} == {IndexedStoreLayer} and store_of(ours) is not None
    assert_same(ours, stock)
    ours, stock = (CHANGES[change](cache) or cache for cache in (ours, stock))
    assert_same(ours, stock)
    rows = {"repeat": 4, "select": 1}.get(change, 2)
    assert_same(*(filled(cache, 3, seed=1, rows=rows) for cache in (ours, stock)))
    assert store_of(ours) is not None and {type(layer) for layer in ours.layers} == {IndexedStoreLayer}


def test_what_the_store_cannot_hold_makes_it_stock_with_its_index():
    stock, ours = filled(stock_cache()), stock_cache()
    adopt(ours, SHAPES)
    filled(ours)
    for cache in (ours, stock):
        cache.layers[0].keys = cache.layers[0].keys * 2
    assert type(ours.layers[0]) is DynamicIndexedLayer
    assert_same(ours, stock)
    assert not isinstance(adopt(ours, SHAPES), str)
    assert_same(ours, stock)


def test_an_index_of_another_length_is_left():
    cache = filled(stock_cache())
    cache.layers[0].update_indexer(torch.zeros(2, 1, 12))
    assert adopt(cache, SHAPES) == "index keys of other rows or another length"
