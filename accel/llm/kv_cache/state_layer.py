"""A layer of a DynamicCache whose states are in a store."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from accel.libraries.cache import LinearAttentionLayer
from accel.llm.kv_cache.layer_of_store import LayerOfStore, steps_aside
from accel.llm.kv_cache.shape import StateShape


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
    @steps_aside
    def has_previous_state(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.index] > 0)

    @property
    @steps_aside
    def is_conv_states_initialized(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.index] > 0 and self.states.window is not None)

    @property
    @steps_aside
    def is_recurrent_states_initialized(self) -> Mapping[int, bool]:
        return one(self.store.lengths[self.index] > 0 and self.states.state is not None)

    @property
    @steps_aside
    def conv_kernel_size(self) -> Mapping[int, int | None]:
        window = self.states.window
        return one(window[0] if window is not None and self.store.lengths[self.index] else None)

    @property
    def states(self) -> StateShape:
        shape = self.shape
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
        stock = LinearAttentionLayer()
        if self.store.lengths[self.index]:
            inputs, state = self.store.read_state(self.index)
            stock.lazy_initialization(conv_states=inputs, recurrent_states=state)
            for into, kept in ((stock.conv_states, inputs), (stock.recurrent_states, state)):
                if kept is not None:
                    into[0].copy_(kept)
            stock.has_previous_state[0] = True
        self.store.drop(self.index)
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
