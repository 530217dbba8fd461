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

    @property
    @steps_aside
    def indexer_keys(self) -> torch.Tensor | None:
        """(rows, tokens, D), None before the first token."""
        return self.keys_of_index.indexer_keys

    @indexer_keys.setter
    def indexer_keys(self, keys: torch.Tensor | None) -> None:
        self.keys_of_index.indexer_keys = keys

    @property
    @steps_aside
    def indexer_position_ids(self) -> torch.Tensor | None:
        return getattr(self.keys_of_index, "indexer_position_ids", None)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: torch.Tensor | None) -> None:
        self.keys_of_index.indexer_position_ids = positions

    @property
    @steps_aside
    def is_indexer_initialized(self) -> bool:
        return self.keys_of_index.is_indexer_initialized

    @steps_aside
    def lazy_initialization_indexer(self, *args: Any, **kwargs: Any) -> None:
        self.keys_of_index.lazy_initialization_indexer(*args, **kwargs)

    @steps_aside
    def update_indexer(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.keys_of_index.update_indexer(*args, **kwargs)

    reset, reorder_cache, crop, batch_repeat_interleave, batch_select_indices = map(
        _of_both, ("reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")
    )
