"""Caches of a model's own class that list states beside their layers: seen as layers alone, and over a store."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from accel.libraries.cache import STATES, DynamicCache, DynamicLayer, LinearAttentionLayer, keeps_states_beside
from accel.llm.kv_cache.shape import STATE, LayerShape, StateShape
from accel.llm.kv_cache.state_layer import StateLayer


class BesideStore:
    """First base of such a class over a store. Whoever asks for its states, or for its length, turns it into one of its
    own class, with tensors of its own.

    state_layers: the layers of the store that keep states, by place. In their place a list of layers has empty ones.
    """

    state_layers: dict[int, StateLayer]

    def leave(self) -> Any:
        """Becomes what it stands for."""
        layers: list = self.layers  # type: ignore[attr-defined]
        kept = vars(self).pop("state_layers")
        self.__class__ = type(self).__mro__[2]
        states: list[Any] = []
        for place, layer in kept.items():
            if layer.store.lengths[place]:
                states += [[] for _ in range(len(states), place + 1)]
                states[place] = layer.store.read_state(place)[1].to(layer.dtype)
            layer.store.drop(place)
        setattr(self, STATES, states)
        while layers and not layers[-1].get_seq_length():  # the library makes them when they are written
            layers.pop()
        return self

    def __len__(self) -> int:
        return len(self.leave())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.leave().__reduce_ex__(protocol)


@lru_cache(maxsize=64)
def _over_store(kind: Any) -> type:
    """This class over a store."""

    def put(self: BesideStore, states: list) -> None:
        setattr(self.leave(), STATES, states)

    states = property(lambda self: getattr(self.leave(), STATES), put)
    return type(kind.__name__, (BesideStore, kind), {STATES: states, "__module__": kind.__module__})


def in_layers(cache: Any, shapes: Sequence[LayerShape] = ()) -> Any:
    """A DynamicCache of the same layers, with states in layers of their own, for one that keeps them beside; others as
    they are. shapes: of its layers; where they are not known, states that are empty have none.
    """
    if type(cache) is DynamicCache or not keeps_states_beside(type(cache)):
        return cache
    held: Any = vars(cache).get("state_layers")
    if held is None:
        states = enumerate(getattr(cache, STATES))
        held = {place: _holding(state) for place, state in states if isinstance(state, torch.Tensor)}
    places = {place for place, shape in enumerate(shapes) if isinstance(shape, StateShape) and shape.keeps}
    twin, layers = DynamicCache(), list(cache.layers)
    layers += [DynamicLayer() for _ in range(len(layers), max(places | held.keys(), default=-1) + 1)]
    for place in places | held.keys():
        layers[place] = held.get(place) or LinearAttentionLayer()
    twin.layers, twin.offloading = layers, cache.offloading
    return twin


def _holding(state: torch.Tensor) -> LinearAttentionLayer:
    """A layer of this state."""
    layer = LinearAttentionLayer()
    layer.recurrent_states[0], layer.has_previous_state[0] = state.to(STATE), True
    return layer


def put_back(cache: Any, twin: DynamicCache) -> None:
    """Gives a cache the layers of what `in_layers` made of it, which are in a store now."""
    if cache is twin:
        return
    states = {place: layer for place, layer in enumerate(twin.layers) if type(layer) is StateLayer}
    cache.layers[:] = [DynamicLayer() if place in states else layer for place, layer in enumerate(twin.layers)]
    if not isinstance(cache, BesideStore):
        vars(cache).pop(STATES, None)
        kind: Any = type(cache)
        cache.__class__ = _over_store(kind)
    cache.state_layers = states
