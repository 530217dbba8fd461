"""Layers of a DynamicCache whose states are in a store, some with keys and values beside them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accel.libraries.cache import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from accel.llm.kv_cache.layer_of_store import LayerOfStore, leaving, left, steps_aside
from accel.llm.kv_cache.shape import StateShape, cache_layers
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
    # (rows, channels, taps) in order of time, and (rows, ...); None before the first token.
    conv_states, recurrent_states = left("conv_states"), left("recurrent_states")
    lazy_initialization, activate_past_recording = leaving("lazy_initialization"), leaving("activate_past_recording")
    update_conv_state, update_recurrent_state = leaving("update_conv_state"), leaving("update_recurrent_state")

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
    def crop(self, tokens_to_remove: int) -> None:
        """Raises RuntimeError, as a stock layer that records no past."""
        LinearAttentionLayer().crop(tokens_to_remove)


class PairLayer(LinearAttentionAndFullAttentionLayer, StoreLayer, StateLayer):
    """A layer of a cache with keys, values and states: two layers of a Store; becomes a stock layer as a whole."""

    __init__ = LayerOfStore.__init__
    reset, reorder_cache = StoreLayer.reset, StoreLayer.reorder_cache
    batch_repeat_interleave, batch_select_indices = StoreLayer.batch_repeat_interleave, StoreLayer.batch_select_indices
    offload, prefetch = LayerOfStore.offload, LayerOfStore.prefetch
    crop, activate_past_recording = StateLayer.crop, StateLayer.activate_past_recording

    @property
    def states_at(self) -> int:
        return self.index + cache_layers(self.store.shapes)

    @property
    def places(self) -> tuple[int, ...]:
        return self.index, self.states_at

    def stock(self) -> LinearAttentionAndFullAttentionLayer:
        return LinearAttentionAndFullAttentionLayer()

    def _filled(self) -> LinearAttentionAndFullAttentionLayer:
        return self._with_states(StoreLayer._filled(self))

    @steps_aside
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """By keys and values, or by keyword for states."""
        (StoreLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)
