"""Layers of a DynamicCache whose states are in a store, some with keys and values beside them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from accel.libraries.cache import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from accel.llm.kv_cache.layer_of_store import LayerOfStore, steps_aside
from accel.llm.kv_cache.shape import StateShape, cache_layers
from accel.llm.kv_cache.store import RowSelection
from accel.llm.kv_cache.store_layer import StoreLayer


def one(value: Any) -> Mapping[int, Any]:
    """A value for each state of a layer, of which there is one. Not to be edited: an edit would be lost."""
    return MappingProxyType({0: value})


class StateLayer(LinearAttentionLayer, LayerOfStore):
    """One layer of a Store, used as a LinearAttentionLayer.

    Whoever reads, assigns or updates its states, or has it record its past, turns it into a stock layer with the same
    content; `adopt` takes it back. What is asked without looking at states is answered as by the stock layer.
    """

    __init__ = LayerOfStore.__init__
    reset, reorder_cache = LayerOfStore.reset, LayerOfStore.reorder_cache
    offload, prefetch = LayerOfStore.offload, LayerOfStore.prefetch
    number_of_states, record_past = 1, False

    @property
    def states_at(self) -> int:
        """Which layer of the store keeps the states."""
        return self.index

    @property
    @steps_aside
    def has_previous_state(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.states_at] > 0)

    @property
    @steps_aside
    def is_conv_states_initialized(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.states_at] > 0 and self.states.window is not None)

    @property
    @steps_aside
    def is_recurrent_states_initialized(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.states_at] > 0 and self.states.state is not None)

    @property
    @steps_aside
    def conv_kernel_size(self) -> Mapping[int, int | None]:
        window = self.states.window
        return one(window[0] if window is not None and self.store.lengths[self.states_at] else None)

    @property
    def states(self) -> StateShape:
        shape = self.store.shapes[self.states_at]
        assert isinstance(shape, StateShape)
        return shape

    @property
    @steps_aside
    def conv_states(self) -> dict[int, torch.Tensor | None]:
        """{0: (rows, channels, taps) in order of time}, {0: None} before the first token."""
        self.leave()
        return self.conv_states

    @conv_states.setter
    def conv_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self.leave()
        self.conv_states = states

    @property
    @steps_aside
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """{0: (rows, ...)}, {0: None} before the first token."""
        self.leave()
        return self.recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor | None]) -> None:
        self.leave()
        self.recurrent_states = states

    def _filled(self) -> LinearAttentionLayer:
        return self._with_states(LinearAttentionLayer())

    def _with_states(self, stock: LinearAttentionLayer) -> LinearAttentionLayer:
        """The stock layer, with states of its own; the store drops them."""
        if self.store.lengths[self.states_at]:
            inputs, state = self.store.read_state(self.states_at)
            stock.lazy_initialization(conv_states=inputs, recurrent_states=state)
            for into, kept in ((stock.conv_states, inputs), (stock.recurrent_states, state)):
                if kept is not None:
                    into[0].copy_(kept)
            stock.has_previous_state[0] = True
        self.store.drop(self.states_at)
        return stock

    @steps_aside
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        self.leave()
        self.lazy_initialization(*args, **kwargs)

    @steps_aside
    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.leave()
        return self.update_conv_state(*args, **kwargs)

    @steps_aside
    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.leave()
        return self.update_recurrent_state(*args, **kwargs)

    @steps_aside
    def activate_past_recording(self) -> None:
        self.leave()
        self.activate_past_recording()

    @steps_aside
    def crop(self, tokens_to_remove: int) -> None:
        """Raises RuntimeError, as a stock layer that records no past."""
        LinearAttentionLayer().crop(tokens_to_remove)


class PairLayer(LinearAttentionAndFullAttentionLayer, StoreLayer, StateLayer):
    """One layer of a cache that keeps keys and values, and states beside them: two layers of a Store.

    As both of its kinds; becomes a stock layer as a whole.
    """

    __init__ = LayerOfStore.__init__
    offload, prefetch = LayerOfStore.offload, LayerOfStore.prefetch
    crop, activate_past_recording = StateLayer.crop, StateLayer.activate_past_recording

    @property
    def states_at(self) -> int:
        return self.index + cache_layers(self.store.shapes)

    def stock(self) -> LinearAttentionAndFullAttentionLayer:
        return LinearAttentionAndFullAttentionLayer()

    def _filled(self) -> LinearAttentionAndFullAttentionLayer:
        return self._with_states(StoreLayer._filled(self))

    @steps_aside
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """By keys and values, or by keyword for states."""
        (StoreLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)

    @steps_aside
    def reset(self) -> None:
        for layer in (self.index, self.states_at):
            self.store.empty(layer)

    @steps_aside
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._both(RowSelection("reorder", beam_idx))

    @steps_aside
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._both(RowSelection("repeat", repeats))

    @steps_aside
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._both(RowSelection("select", indices))

    def _both(self, rows: RowSelection) -> None:
        for layer in (self.index, self.states_at):
            self.store.request(layer, rows)
