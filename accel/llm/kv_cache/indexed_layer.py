"""A layer of a DynamicCache whose latents are in a store, and which keeps the keys of an index itself."""

import copy
from typing import Any

import torch

from accel.libraries.cache import DynamicIndexedLayer
from accel.llm.kv_cache.layer_of_store import LayerOfStore, steps_aside
from accel.llm.kv_cache.store import Store
from accel.llm.kv_cache.store_layer import StoreLayer


def _of_both(name: str) -> Any:
    """The method of this name, of the layer of a store and then of the index keys."""

    @steps_aside
    def of_both(self: "IndexedStoreLayer", *args: Any, **kwargs: Any) -> None:
        getattr(StoreLayer, name)(self, *args, **kwargs)
        getattr(self.keys_of_index, name)(*args, **kwargs)

    return of_both


def _of_index(name: str) -> Any:
    """What the index keys have by this name, which can be assigned; None where they have none."""

    def read(self: "IndexedStoreLayer") -> Any:
        return getattr(self.keys_of_index, name, None)

    def assign(self: "IndexedStoreLayer", value: Any) -> None:
        setattr(self.keys_of_index, name, value)

    read.__name__ = name
    return property(steps_aside(read), assign)


class IndexedStoreLayer(StoreLayer, DynamicIndexedLayer):
    """One layer of a Store, used as a DynamicIndexedLayer, in the place of `before`.

    keys_of_index: a stock layer that has index keys alone, and does with them what stock does.
    """

    offload, prefetch = LayerOfStore.offload, LayerOfStore.prefetch

    def __init__(self, store: Store, place: int, before: DynamicIndexedLayer):
        super().__init__(store, place)
        mine = isinstance(before, IndexedStoreLayer)
        self.keys_of_index: DynamicIndexedLayer = before.keys_of_index if mine else copy.copy(before)
        if not mine:
            self.keys_of_index.keys = self.keys_of_index.values = None
            self.keys_of_index.is_initialized = False

    def stock(self) -> DynamicIndexedLayer:
        return self.keys_of_index

    # (rows, tokens, D) and their places, None before the first token.
    indexer_keys, indexer_position_ids, is_indexer_initialized = map(
        _of_index, ("indexer_keys", "indexer_position_ids", "is_indexer_initialized")
    )

    @steps_aside
    def lazy_initialization_indexer(self, *args: Any, **kwargs: Any) -> None:
        self.keys_of_index.lazy_initialization_indexer(*args, **kwargs)

    @steps_aside
    def update_indexer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.keys_of_index.update_indexer(*args, **kwargs)

    reset, reorder_cache, crop, batch_repeat_interleave, batch_select_indices = map(
        _of_both, ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")
    )
