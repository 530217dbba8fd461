"""A DynamicCache over the common store: stock code sees its usual layers, the fused layers see blocks and addresses."""

from collections.abc import Sequence
from typing import Any

import torch

from accel.libraries.cache import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from accel.llm.kv_cache.blocks import Shape
from accel.llm.kv_cache.store import CachedRows, Store

STOCK = (DynamicLayer, DynamicSlidingWindowLayer)


class StoreLayer(DynamicLayer):
    """One layer of a Store, used as a DynamicLayer. All tokens are kept, by layers with a sliding window too.

    `keys` and `values` are views into the store: right until the next call, and edits of them are edits of the cache.
    What a common store cannot hold (other rows than the other layers', another dtype, gradients, assigned keys) makes
    of this layer a stock one with the same content; `adopt` takes it in again. So does whoever looks at the keys or
    values of a store that rounds them: no view could show them, and an edit of a copy would be lost.
    """

    def __init__(self, store: Store, index: int):
        self.store, self.index = store, index  # what else a stock layer has is read from the store

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
    def is_initialized(self) -> bool:
        return self.store.capacity > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """(rows, heads, tokens, dim), or None before the first token."""
        return self._read(0)

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self.leave()
        self.keys = keys

    @property
    def values(self) -> torch.Tensor | None:
        return self._read(1)

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self.leave()
        self.values = values

    def _read(self, which: int) -> torch.Tensor | None:
        if self.index in self.store.asked or (self.shape.codes is not None and self.get_seq_length()):
            # an edit of what is shown must not be lost
            self.leave()
            return (self.keys, self.values)[which]
        return self.store.read(self.index)[which] if self.is_initialized else None

    def leave(self) -> None:
        """Becomes the stock layer it stands for, with tensors of its own."""
        store, index, kept = self.store, self.index, None
        if self.get_seq_length():
            kept = [t.clone(memory_format=torch.contiguous_format) for t in store.read(index)]
        del self.store, self.index
        self.__class__ = DynamicLayer
        DynamicLayer.__init__(self)
        if kept is not None:
            self.lazy_initialization(*kept)
            self.keys, self.values = kept
        store.drop(index)

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        rows, heads, _, dim = keys.shape
        return (
            not torch.is_grad_enabled()  # what is kept in place cannot be what a backward pass saved
            and values.shape == keys.shape
            and keys.dtype == values.dtype
            and Shape(heads, dim, keys.dtype, keys.device) == self.shape.exact
            and (rows == self.store.rows or not self.store.length)
            and self.index not in self.store.asked
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._fits(key_states, value_states):
            self.store.reserve(key_states.shape[0], max(1, self.store.length))
        else:
            self.leave()
            self.lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds (rows, heads, new, dim); returns all there is. Raises torch.OutOfMemoryError, and holds what it held."""
        if not self._fits(key_states, value_states):
            self.leave()
            return self.update(key_states, value_states, *args, **kwargs)
        self.store.write(self.index, key_states, value_states)
        return self.store.read(self.index)

    def get_seq_length(self) -> int:
        return self.store.lengths[self.index]

    def crop(self, tokens_to_remove: int) -> None:
        """Takes -tokens_to_remove tokens away. A positive number is a length, where transformers still takes one."""
        tokens_to_remove = self.store.read_number(tokens_to_remove)  # assisted decoding may come with a tensor
        if tokens_to_remove > 0:
            DynamicLayer().crop(tokens_to_remove)  # raises or warns, as this version of transformers does
            tokens_to_remove -= max(self.get_seq_length(), tokens_to_remove)
        self.store.shorten(self.index, -tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Nothing to do: no token is ever dropped."""

    def reset(self) -> None:
        self.store.empty(self.index)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.store.ask(self.index, CachedRows("reorder", beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.store.ask(self.index, CachedRows("repeat", repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.store.ask(self.index, CachedRows("select", indices))

    def offload(self) -> None:
        """Stays where the kernels read it."""

    def prefetch(self) -> None:
        """Is there."""


def store_of(cache: Any) -> Store | None:
    """The store under a cache that is wholly ours: every layer in its place, all of them alike."""
    if type(cache) is not DynamicCache or not cache.layers or type(cache.layers[0]) is not StoreLayer:
        return None
    store, layers = cache.layers[0].store, cache.layers
    mine = all(type(layer) is StoreLayer and layer.store is store for layer in layers)
    in_order = mine and [layer.index for layer in layers] == list(range(len(store.shapes)))
    return store if in_order and store.whole else None


def is_ours(cache: Any) -> bool:
    return store_of(cache) is not None


def adopt(cache: Any, shapes: Sequence[Shape], wanted: int = 0) -> Store | str:
    """The store under `cache`, a plain DynamicCache, put there with all it holds if need be; or why it cannot be.

    shapes: one a layer of the model. wanted: tokens a row will come to hold, or 0 if nobody knows. With a reason the
    cache is as it was.
    """
    store = store_of(cache)
    if store is None or store.shapes != tuple(shapes):
        reason = _foreign(cache, shapes)
        if reason is not None:
            return reason
        store = Store(shapes, wanted)
        try:
            _fill(store, cache)
        except torch.OutOfMemoryError:
            return "no memory to take the cache over"
        cache.layers[:] = [StoreLayer(store, index) for index in range(len(shapes))]
    store.wanted = wanted or store.wanted
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
        if type(layer) not in (*STOCK, StoreLayer):
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
    tokens = cache.get_seq_length()
    if tokens:
        store.reserve(_held(cache.layers[0])[0].shape[0], tokens)
        with torch.no_grad():
            for index, layer in enumerate(cache.layers):
                store.write(index, *_held(layer))


def _held(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer, not to be edited: a look at them that makes no stock layer of one that rounds."""
    if type(layer) is StoreLayer and layer.shape.codes is not None:
        return layer.store.read(layer.index)
    return layer.keys, layer.values
