"""A DynamicCache over the common store: stock code sees its usual layers, the fused layers see blocks and addresses."""

import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._dynamo.exc import UnspecializeRestartAnalysis

from accel.libraries.cache import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from accel.llm.kv_cache.shape import Shape
from accel.llm.kv_cache.store import RowSelection, Store

STOCK = (DynamicLayer, DynamicSlidingWindowLayer)


def steps_aside(method: Callable) -> Callable:
    """A method or property of a layer. While torch.compile traces it, that of the library's own layer runs instead."""
    name = method.__name__

    @wraps(method)
    def called(self: "StoreLayer", *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        found = getattr(self.give_way(), name)
        return found(*args, **kwargs) if callable(found) else found

    return called


class StoreLayer(DynamicLayer):
    """One layer of a Store, used as a DynamicLayer.

    `keys` and `values` are views into the store, valid until the next call; edits of them are edits of the cache. What
    the store cannot hold (other rows than the other layers', another dtype, gradients, assigned keys) turns this layer
    into a stock one with the same content; `adopt` takes it back. So does reading keys or values that are stored in 8
    bits: they have no view, and an edit of a copy would be lost.
    """

    def __init__(self, store: Store, index: int):
        self.store, self.index = store, index  # what else a stock layer has is read from the store

    def stock(self) -> DynamicLayer:
        """The layer that it stands for, empty."""
        return DynamicLayer()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the stock layer would hold."""
        return self.store.read(self.index)

    @property
    def shape(self) -> Shape:
        return self.store.shapes[self.index]

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def device(self) -> torch.device:
        return self.shape.device

    @property
    @steps_aside
    def is_initialized(self) -> bool:
        return self.store.capacity > 0

    @property
    @steps_aside
    def keys(self) -> torch.Tensor | None:
        """(rows, heads, tokens, dim), or None before the first token."""
        return self._read(0)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self.leave()
        self.keys = keys

    @property
    @steps_aside
    def values(self) -> torch.Tensor | None:
        return self._read(1)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self.leave()
        self.values = values

    def _read(self, which: int) -> torch.Tensor | None:
        if self.index in self.store.requested or (self.shape.kv_dtype is not None and self.get_seq_length()):
            # An edit of what is shown must not be lost.
            self.leave()
            return (self.keys, self.values)[which]
        return self.read()[which] if self.is_initialized else None

    def leave(self) -> None:
        """Becomes the stock layer it stands for, with tensors of its own."""
        stock = self._filled()
        self.__dict__.clear()
        self.__class__ = type(stock)
        self.__dict__.update(vars(stock))

    def give_way(self) -> DynamicLayer:
        """The stock layer that takes its place in the cache, for a compiler, which traces no change of a class."""
        cache = self.store.cache_ref()
        if cache is None or cache.layers[self.index] is not self or not self.store.readable:
            self.trace_anew()
        cache.layers[self.index] = stock = self._filled()
        return stock

    @torch.compiler.assume_constant_result
    def trace_anew(self) -> None:
        """Becomes a stock layer outside of the trace, which then starts anew."""
        self.leave()
        raise UnspecializeRestartAnalysis  # which starts the trace anew, and from nothing

    def _filled(self) -> DynamicLayer:
        """The stock layer, with tensors of its own; the store drops this one."""
        stock = self.stock()
        if self.store.lengths[self.index]:
            keys, values = (t.clone(memory_format=torch.contiguous_format) for t in self.read())
            stock.lazy_initialization(keys, values)
            stock.keys, stock.values = keys, values
        self.store.drop(self.index)
        return stock

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        rows, heads, _, dim = keys.shape
        return (
            not torch.is_grad_enabled()  # what is kept in place cannot be what a backward pass saved
            and values.shape == keys.shape
            and keys.dtype == values.dtype
            and Shape(heads, dim, keys.dtype, keys.device) == self.shape.exact
            and (rows == self.store.rows or not self.store.length)
            and self.index not in self.store.requested
        )

    @steps_aside
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._fits(key_states, value_states):
            self.store.reserve(key_states.shape[0], max(1, self.store.length))
        else:
            self.leave()
            self.lazy_initialization(key_states, value_states)

    @steps_aside
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds (rows, heads, new, dim); returns all there is. Raises torch.OutOfMemoryError, and holds what it held."""
        if not self._fits(key_states, value_states):
            self.leave()
            return self.update(key_states, value_states, *args, **kwargs)
        self.store.write(self.index, key_states, value_states)
        return self.seen(key_states.shape[2])

    def seen(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that an update by so many tokens gives."""
        return self.store.read(self.index)

    @steps_aside
    def get_seq_length(self) -> int:
        return self.store.lengths[self.index]

    @steps_aside
    def crop(self, tokens_to_remove: int) -> None:
        """Takes -tokens_to_remove tokens away. A positive number is a length, where transformers still takes one."""
        tokens_to_remove = self.store.read_number(tokens_to_remove)  # assisted decoding may come with a tensor
        if tokens_to_remove > 0:
            DynamicLayer().crop(tokens_to_remove)  # raises or warns, as this version of transformers does
            tokens_to_remove -= max(self.get_seq_length(), tokens_to_remove)
        self.store.shorten(self.index, -tokens_to_remove)

    @steps_aside
    def activate_past_recording(self) -> None:
        """Nothing to do: no token is ever dropped."""

    @steps_aside
    def reset(self) -> None:
        self.store.empty(self.index)

    @steps_aside
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.store.request(self.index, RowSelection("reorder", beam_idx))

    @steps_aside
    def batch_repeat_interleave(self, repeats: int) -> None:
        self.store.request(self.index, RowSelection("repeat", repeats))

    @steps_aside
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.store.request(self.index, RowSelection("select", indices))

    def offload(self) -> None:
        """Stays where the kernels read it."""

    def prefetch(self) -> None:
        """Is there."""


class SlidingStoreLayer(StoreLayer, DynamicSlidingWindowLayer):
    """The same in the place of a layer with a sliding window. All tokens are kept; shown are those that stock keeps.

    recorded_from: the length from which on stock would drop nothing, until the next crop; None where it drops.
    """

    def __init__(self, store: Store, index: int, window: int, recorded_from: int | None = None):
        super().__init__(store, index)
        self.sliding_window, self.recorded_from = window, recorded_from

    @property
    @steps_aside
    def record_past(self) -> bool:
        return self.recorded_from is not None

    @property
    @steps_aside
    def cumulative_length(self) -> int:
        return self.store.lengths[self.index]

    def stock(self) -> DynamicLayer:
        layer = DynamicSlidingWindowLayer(self.sliding_window)
        layer.cumulative_length, layer.record_past = self.store.lengths[self.index], self.recorded_from is not None
        return layer

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        recorded = 0 if self.recorded_from is None else max(self.store.lengths[self.index] - self.recorded_from, 0)
        return self._last(recorded)

    def seen(self, new: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._last(new)

    def _last(self, beside: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the window holds before the next token, and so many more."""
        keys, values = self.store.read(self.index)
        first = -self.sliding_window + 1 - beside
        return keys[:, :, first:], values[:, :, first:]

    @steps_aside
    def activate_past_recording(self) -> None:
        if self.recorded_from is None:
            self.recorded_from = self.cumulative_length

    @steps_aside
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.record_past:
            self.recorded_from = self.cumulative_length

    @steps_aside
    def reset(self) -> None:
        super().reset()
        if self.record_past:
            self.recorded_from = 0


OURS = (StoreLayer, SlidingStoreLayer)


def _store_layer(store: Store, index: int, before: Any) -> StoreLayer:
    """In the place of another layer, or of none yet."""
    if not isinstance(before, DynamicSlidingWindowLayer):
        return StoreLayer(store, index)
    recorded = before.recorded_from if isinstance(before, SlidingStoreLayer) else None
    if recorded is None and getattr(before, "record_past", False):
        recorded = before.cumulative_length
    return SlidingStoreLayer(store, index, before.sliding_window, recorded)


def store_of(cache: Any) -> Store | None:
    """The store under a cache that is wholly ours: every layer in its place, all of them alike."""
    if type(cache) is not DynamicCache or not cache.layers or type(cache.layers[0]) not in OURS:
        return None
    store, layers = cache.layers[0].store, cache.layers
    mine = all(type(layer) in OURS and layer.store is store for layer in layers)
    in_order = mine and [layer.index for layer in layers] == list(range(len(store.shapes)))
    return store if in_order and store.consistent else None


def adopt(cache: Any, shapes: Sequence[Shape], expected_tokens: int = 0) -> Store | str:
    """The store under `cache`, a plain DynamicCache, put there with all it holds if need be; or why it cannot be.

    shapes: one a layer of the model. expected_tokens: of a row in the end, 0 if unknown. With a reason nothing has
    changed.
    """
    store = store_of(cache)
    if store is None or store.shapes != tuple(shapes):
        reason = _foreign(cache, shapes)
        if reason is not None:
            return reason
        store = Store(shapes, expected_tokens)
        try:
            _fill(store, cache)
        except torch.OutOfMemoryError:
            return "no memory to take the cache over"
        before = [*cache.layers, *(None for _ in range(len(shapes) - len(cache.layers)))]
        cache.layers[:] = [_store_layer(store, index, layer) for index, layer in enumerate(before)]
        store.cache_ref = weakref.ref(cache)
    store.expected_tokens = expected_tokens or store.expected_tokens
    return store


def _foreign(cache: Any, shapes: Sequence[Shape]) -> str | None:
    """Why what the cache holds is not for a store of these shapes."""
    if type(cache) is not DynamicCache:
        return f"a cache of another kind: {type(cache).__name__}"
    if cache.offloading:
        return "an offloaded cache"
    layers = cache.layers
    if len(layers) > len(shapes) or (len(layers) < len(shapes) and cache.layer_class_to_replicate is not DynamicLayer):
        return "a cache of another number of layers"
    for layer in layers:
        if type(layer) not in (*STOCK, *OURS):
            return f"a cache layer of another kind: {type(layer).__name__}"
    lengths = [layer.get_seq_length() for layer in layers]
    if not any(lengths):
        return None
    if len(set(lengths)) > 1 or len(layers) < len(shapes):
        return "cache layers of different lengths"
    if len({_held(layer)[0].shape[0] for layer in layers}) > 1:
        return "cache layers of different batch sizes"
    for layer, shape in zip(layers, shapes, strict=True):
        keys, values = _held(layer)
        if keys.shape[2] != layer.get_seq_length():
            return "a sliding window has dropped tokens of the cache"
        if keys.shape != values.shape or keys.dtype != values.dtype or keys.device != values.device:
            return "keys and values of different shapes"
        if Shape(keys.shape[1], keys.shape[3], keys.dtype, keys.device) != shape.exact:
            return "a cache of other heads, another dtype or device"
        if keys.requires_grad or values.requires_grad:
            return "a cache with gradients"
    return None


def _fill(store: Store, cache: DynamicCache) -> None:
    if tokens := cache.get_seq_length():
        store.reserve(_held(cache.layers[0])[0].shape[0], tokens)
        with torch.no_grad():
            for index, layer in enumerate(cache.layers):
                store.write(index, *_held(layer))


def _held(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, not to be edited: a look at them makes no stock layer of one of ours."""
    return layer.store.read(layer.index) if type(layer) in OURS else (layer.keys, layer.values)
