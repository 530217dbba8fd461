"""Layers of a DynamicCache whose keys and values are in a store."""

from typing import Any

import torch

from accel.libraries.cache import DynamicLayer, DynamicSlidingWindowLayer
from accel.llm.kv_cache.layer_of_store import LayerOfStore, left, steps_aside
from accel.llm.kv_cache.store import Store


class StoreLayer(DynamicLayer, LayerOfStore):
    """One layer of a Store, used as a DynamicLayer.

    `keys` and `values` are views into the store, valid until the next call; edits of them are edits of the cache. What
    the store cannot hold (other rows than the other layers', another dtype, gradients, assigned keys) turns this layer
    into a stock one with the same content; `adopt` takes it back. So does reading keys or values that are stored in 8
    bits: they have no view, and an edit of a copy would be lost.
    """

    early = False  # initialized whether or not there are tokens
    __init__ = LayerOfStore.__init__
    reset, reorder_cache = LayerOfStore.reset, LayerOfStore.reorder_cache
    batch_repeat_interleave, batch_select_indices = (
        LayerOfStore.batch_repeat_interleave,
        LayerOfStore.batch_select_indices,
    )
    offload, prefetch = LayerOfStore.offload, LayerOfStore.prefetch

    def stock(self) -> DynamicLayer:
        """The layer that it stands for, empty."""
        return DynamicLayer()

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the stock layer would hold."""
        return self.store.read(self.index)

    @property
    @steps_aside
    def is_initialized(self) -> bool:
        # There is room before a call's first layer writes.
        return self.store.lengths[self.index] > 0 or (self.early and self.store.capacity > 0)

    # (rows, heads, tokens, dim), or None before the first token.
    keys, values = left("keys", lambda self: self._read(0)), left("values", lambda self: self._read(1))

    def _read(self, which: int) -> torch.Tensor | None:
        if self.index in self.store.requested or (self.shape.kv_dtype is not None and self.get_seq_length()):
            # An edit of what is shown must not be lost.
            self.leave()
            return (self.keys, self.values)[which]
        return self.read()[which] if self.store.capacity else None

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
        rows = keys.shape[0]
        shape: Any = self.shape
        return (
            not torch.is_grad_enabled()  # what is kept in place cannot be what a backward pass saved
            and values.shape[:3:2] == keys.shape[:3:2]
            and shape.takes(keys, values)
            and (rows == self.store.rows or not self.store.length)
            and self.index not in self.store.requested
        )

    @steps_aside
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._fits(key_states, value_states):
            self.store.reserve(key_states.shape[0], max(1, self.store.length))
            self.early = True
        else:
            self.leave()
            self.lazy_initialization(key_states, value_states)

    @steps_aside
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds (rows, heads, new, dim); returns all, contiguous. Raises torch.OutOfMemoryError, and is as before."""
        if not self._fits(key_states, value_states):
            self.leave()
            return self.update(key_states, value_states, *args, **kwargs)
        self.store.write(self.index, key_states, value_states)
        keys, values = self.seen(key_states.shape[2])
        return keys.contiguous(), values.contiguous()

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
        self.early = self.is_initialized  # stays so when the last token goes
        self.store.shorten(self.index, -tokens_to_remove)

    @steps_aside
    def activate_past_recording(self) -> None:
        """Nothing to do: no token is ever dropped."""


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
