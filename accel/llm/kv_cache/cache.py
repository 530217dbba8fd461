"""A DynamicCache over the common store: stock code sees its usual layers, the fused layers see blocks and addresses."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from accel.libraries.cache import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from accel.llm.kv_cache.beside_cache import in_layers, put_back
from accel.llm.kv_cache.indexed_layer import IndexedStoreLayer
from accel.llm.kv_cache.shape import STATE, LayerShape, StateShape, cache_layers
from accel.llm.kv_cache.state_layer import PairLayer, StateLayer
from accel.llm.kv_cache.store import Store
from accel.llm.kv_cache.store_layer import SlidingStoreLayer, StoreLayer

STOCK = (DynamicLayer, DynamicSlidingWindowLayer)
OF_STATES, PAIRS = (LinearAttentionLayer, StateLayer), (LinearAttentionAndFullAttentionLayer, PairLayer)
INDEXED = (DynamicIndexedLayer, IndexedStoreLayer)
OURS = (StoreLayer, SlidingStoreLayer, StateLayer, PairLayer, IndexedStoreLayer)


def _store_layer(store: Store, index: int, before: Any) -> Any:
    """In the place of another layer, or of none yet; that itself where the store keeps nothing."""
    if not store.shapes[index].keeps:
        return DynamicLayer() if before is None else before
    if isinstance(store.shapes[index], StateShape):
        return StateLayer(store, index)
    if index + cache_layers(store.shapes) in store.kept:
        return PairLayer(store, index)
    if isinstance(before, INDEXED):
        return IndexedStoreLayer(store, index, before)
    if not isinstance(before, DynamicSlidingWindowLayer):
        return StoreLayer(store, index)
    recorded = before.recorded_from if isinstance(before, SlidingStoreLayer) else None
    if recorded is None and getattr(before, "record_past", False):
        recorded = before.cumulative_length
    return SlidingStoreLayer(store, index, before.sliding_window, recorded)


def store_of(cache: Any) -> Store | None:
    """The store under a cache that is wholly ours: every layer that keeps anything in its place, all of them alike."""
    cache = in_layers(cache)
    if type(cache) is not DynamicCache:
        return None
    store = next((layer.store for layer in cache.layers if type(layer) in OURS), None)
    if store is None or len(cache.layers) != (number := cache_layers(store.shapes)):
        return None
    places = [index for index in store.kept if index < number]
    layers = [cache.layers[index] for index in places]
    mine = all(type(layer) in OURS and layer.store is store for layer in layers)
    in_order = mine and [layer.index for layer in layers] == places
    return store if in_order and store.consistent else None


def adopt(cache: Any, shapes: Sequence[LayerShape], expected_tokens: int = 0) -> Store | str:
    """The store under `cache`, a plain DynamicCache, put there with all it holds if need be; or why it cannot be.

    shapes: one a layer of the model. expected_tokens: of a row in the end, 0 if unknown. With a reason nothing has
    changed.
    """
    store = store_of(cache)
    if store is None or store.shapes != tuple(shapes):
        shown = in_layers(cache, shapes)
        if (reason := _foreign(shown, shapes)) is not None:
            return reason
        store = Store(shapes, expected_tokens)
        try:
            _fill(store, shown)
        except torch.OutOfMemoryError:
            return "no memory to take the cache over"
        before = [*shown.layers, *(None for _ in range(cache_layers(shapes) - len(shown.layers)))]
        shown.layers[:] = [_store_layer(store, index, layer) for index, layer in enumerate(before)]
        put_back(cache, shown)
        store.cache_ref = weakref.ref(cache)
    store.expected_tokens = expected_tokens or store.expected_tokens
    return store


def tokens_in(cache: Any) -> int:
    """Tokens a row in a cache that may be taken over; transformers knows none of one whose layers all keep states."""
    cache = in_layers(cache)
    if type(cache) is not DynamicCache:
        return 0
    if any(type(layer) not in (LinearAttentionLayer, StateLayer) for layer in cache.layers):
        return cache.get_seq_length()
    return max((layer.store.lengths[layer.index] for layer in cache.layers if type(layer) is StateLayer), default=0)


def _length(layer: Any, shape: LayerShape) -> int | None:
    """Tokens that a layer has seen; None for states of a stock layer, which does not know."""
    if not isinstance(shape, StateShape):
        return layer.get_seq_length()
    return layer.store.lengths[layer.states_at] if isinstance(layer, StateLayer) else None


def _foreign(cache: Any, shapes: Sequence[LayerShape]) -> str | None:
    """Why what the cache holds is not for a store of these shapes."""
    if type(cache) is not DynamicCache:
        return f"a cache of another kind: {type(cache).__name__}"
    if cache.offloading:
        return "an offloaded cache"
    layers, number = cache.layers, cache_layers(shapes)
    if len(layers) > number or (len(layers) < number and cache.layer_class_to_replicate is not DynamicLayer):
        return "a cache of another number of layers"
    places = [at for at, shape in enumerate(shapes) if shape.keeps and at % number < len(layers)]
    kept = [(layers[at % number], shapes[at]) for at in places]
    for at, (layer, shape) in zip(places, kept, strict=True):
        known = OF_STATES if isinstance(shape, StateShape) else (*STOCK, *INDEXED, StoreLayer, SlidingStoreLayer)
        if type(layer) not in (PAIRS if at >= number or at + number in places else known):
            return f"a cache layer of another kind: {type(layer).__name__}"
        if isinstance(shape, StateShape) and layer.number_of_states != 1:
            return "a cache layer with several states"
        if isinstance(shape, StateShape) and layer.record_past:
            return "a cache that records the past of its states"
    lengths = [length for layer, shape in kept if (length := _length(layer, shape)) is not None]
    if not any(lengths):
        begun = any(isinstance(shape, StateShape) and layer.has_previous_state[0] for layer, shape in kept)
        return "states of a text of unknown length" if begun else None
    if len(set(lengths)) > 1 or len(kept) < sum(shape.keeps for shape in shapes):
        return "cache layers of different lengths"
    held = [_held(layer, shape) for layer, shape in kept]
    if len({kept.shape[0] for several in held for kept in several if kept is not None}) > 1:
        return "cache layers of different batch sizes"
    tokens = (_foreign_tokens(layer, one, shape) for (layer, shape), one in zip(kept, held, strict=True))
    return next((reason for reason in tokens if reason is not None), None)


def _foreign_tokens(layer: Any, held: Any, shape: LayerShape) -> str | None:
    """Why what one layer holds is not for this shape."""
    if isinstance(shape, StateShape):
        sizes = None if shape.window is None else shape.window[::-1], shape.state
        for kept, size, dtype in zip(held, sizes, (shape.dtype, STATE), strict=True):
            if kept is not None and (kept.shape[1:] != size or kept.dtype != dtype or kept.device != shape.device):
                return "a cache of other states, another dtype or device"
        return "a cache with gradients" if any(kept is not None and kept.requires_grad for kept in held) else None
    keys, values = held
    if keys.shape[2] != layer.get_seq_length():
        return "a sliding window has dropped tokens of the cache"
    index = layer.indexer_keys if isinstance(layer, INDEXED) else None
    if index is not None and index.shape[:2] != keys.shape[:3:2]:
        return "index keys of other rows or another length"
    if keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype or keys.device != values.device:
        return "keys and values of different shapes"
    if not shape.takes(keys, values):
        return "a cache of other heads, another dtype or device"
    return "a cache with gradients" if keys.requires_grad or values.requires_grad else None


def _fill(store: Store, cache: DynamicCache) -> None:
    tokens = tokens_in(cache)
    if not tokens:
        return
    layers = [(index, store.shapes[index], cache.layers[index % len(cache.layers)]) for index in store.kept]
    rows = next(kept.shape[0] for _, shape, layer in layers for kept in _held(layer, shape) if kept is not None)
    store.reserve(rows, tokens)
    with torch.no_grad():
        for index, shape, layer in layers:
            if isinstance(shape, StateShape):
                store.write_state(index, *_held(layer, shape), tokens)
            else:
                store.write(index, *_held(layer, shape))


def _held(layer: Any, shape: LayerShape) -> tuple[Any, Any]:
    """A layer's keys and values, or inputs and state, only to be read; None for states that are zero."""
    if isinstance(shape, StateShape):
        if isinstance(layer, StateLayer):
            return layer.store.read_state(layer.states_at)
        return (layer.conv_states[0], layer.recurrent_states[0]) if layer.has_previous_state[0] else (None, None)
    return layer.store.read(layer.index) if type(layer) in OURS else (layer.keys, layer.values)
