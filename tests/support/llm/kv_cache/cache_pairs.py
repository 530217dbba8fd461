"""A cache over the store and a stock DynamicCache, given the same."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from accel.llm.kv_cache.cache import adopt
from accel.llm.kv_cache.shape import Shape

CPU = torch.device("cpu")
SHAPES = (Shape(2, 4, torch.float32, CPU), Shape(1, 6, torch.float64, CPU), Shape(2, 4, torch.float32, CPU))


def fresh(rows: int, tokens: int, shapes=SHAPES) -> list[torch.Tensor]:
    """One a layer: (keys and values, rows, heads, tokens, dim)."""
    return [torch.randn(2, rows, s.heads, tokens, s.dim, dtype=s.dtype) for s in shapes]


def pair() -> tuple[DynamicCache, DynamicCache]:
    """Ours and stock, empty."""
    ours = DynamicCache()
    assert not isinstance(adopt(ours, SHAPES), str)
    return ours, DynamicCache()


def feed(ours: DynamicCache, stock: DynamicCache, rows: int, tokens: int) -> None:
    """A stock forward on both: what update returns is what attention sees."""
    for layer, (keys, values) in enumerate(fresh(rows, tokens)):
        mine, theirs = ours.update(keys, values, layer), stock.update(keys, values, layer)
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def feed_fast(ours: DynamicCache, stock: DynamicCache, rows: int, tokens: int) -> None:
    """The fused layers write ours without its knowing."""
    store = adopt(ours, SHAPES)
    start = store.length
    store.reserve(rows, start + tokens)
    for layer, (keys, values) in enumerate(fresh(rows, tokens)):
        kv = store.kvs([layer], tokens)[layer]
        where = kv.slots(start, start + tokens)
        kv.keys[where], kv.values[where] = keys.transpose(1, 2), values.transpose(1, 2)
        stock.update(keys, values, layer)
    store.advance(tokens)


def same(ours: DynamicCache, stock: DynamicCache) -> None:
    assert ours.get_seq_length() == stock.get_seq_length()
    for layer in range(len(stock.layers)):
        assert ours.get_mask_sizes(3, layer) == stock.get_mask_sizes(3, layer)
        assert ours.get_seq_length(layer) == stock.get_seq_length(layer)
    if not stock.get_seq_length():
        return
    for (keys, values, *_), (k, v, *_) in zip(ours, stock, strict=True):
        assert torch.equal(keys, k) and torch.equal(values, v)


def filled(rows: int = 2, tokens: int = 15, layers=None) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicLayer() for _ in SHAPES] if layers is None else layers
    for layer, (keys, values) in enumerate(fresh(rows, tokens)):
        cache.update(keys, values, layer)
    return cache
