"""A cache over the store and a stock DynamicCache, given the same."""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from accel.llm.kv_cache.cache import adopt
from accel.llm.kv_cache.shape import LatentShape, Shape

CPU = torch.device("cpu")
SHAPES = (Shape(2, 4, torch.float32, CPU), Shape(1, 6, torch.float64, CPU), Shape(2, 4, torch.float32, CPU))
LATENT = LatentShape(5, 3, 2, torch.float32, CPU)
LATENTS = (LATENT, SHAPES[1], LATENT)


def fresh(rows: int, tokens: int, shapes=SHAPES) -> list:
    """One a layer: keys and values, (rows, heads, tokens, dim) each; of equal sizes in one tensor."""

    def made(dtype, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype)

    return [
        tuple(made(s.dtype, rows, 1, tokens, size) for size in (s.rank, s.rope))
        if isinstance(s, LatentShape)
        else made(s.dtype, 2, rows, s.heads, tokens, s.dim)
        for s in shapes
    ]


def pair(shapes=SHAPES) -> tuple[DynamicCache, DynamicCache]:
    """Ours and stock, empty."""
    ours = DynamicCache()
    assert not isinstance(adopt(ours, shapes), str)
    return ours, DynamicCache()


def feed(ours: DynamicCache, stock: DynamicCache, rows: int, tokens: int, shapes=SHAPES) -> None:
    """A stock forward on both: what update returns is what attention sees."""
    for layer, (keys, values) in enumerate(fresh(rows, tokens, shapes)):
        mine, theirs = ours.update(keys, values, layer), stock.update(keys, values, layer)
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
            assert a.is_contiguous() or not b.is_contiguous()  # some code takes views


def feed_fast(ours: DynamicCache, stock: DynamicCache, rows: int, tokens: int, shapes=SHAPES) -> None:
    """The fused layers write ours without its knowing."""
    store = adopt(ours, shapes)
    start = store.length
    store.reserve(rows, start + tokens)
    for layer, (keys, values) in enumerate(fresh(rows, tokens, shapes)):
        kv = store.kvs([layer], tokens)[layer]
        where = kv.slots(start, start + tokens)
        if isinstance(shapes[layer], LatentShape):
            kv.keys[where] = torch.cat((keys, values), -1).transpose(1, 2)
        else:
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


def filled(rows: int = 2, tokens: int = 15, layers=None, shapes=SHAPES) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [DynamicLayer() for _ in SHAPES] if layers is None else layers
    for layer, (keys, values) in enumerate(fresh(rows, tokens, shapes)):
        cache.update(keys, values, layer)
    return cache
