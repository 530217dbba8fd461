"""The forward of a model of which some layers are understood: stock code, in which those layers run fused.

Stock layers stand between them and keep what they keep, such as a recurrent state, in their own layers of the caller's
cache. The model's Python sees that cache, with its lengths, so no CUDA graph holds for the next step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.errors import Unfit
from accel.libraries.cache import DynamicCache
from accel.llm.generation.calling_convention import CallingConvention
from accel.llm.generation.decoder import DecoderForward
from accel.llm.kv_cache.cache import tokens_in
from accel.llm.kv_cache.shape import LayerShape
from accel.llm.kv_cache.store import Store


class Storeless(Store):
    """Where no layer is fused that keeps anything: all of it is in the caller's cache, of so many tokens."""

    rows = 0

    def __init__(self, length: int):
        super().__init__(())
        self.lengths = {0: length}

    def reserve(self, rows: int, tokens: int) -> None:
        """Nothing to do."""

    def set_padding_mask(self, mask: torch.Tensor | None) -> None:
        """Nobody reads it here."""

    def hides_behind_first(self, mask: torch.Tensor) -> bool:
        return False

    def kvs(self, layers: Sequence[int], tokens: int, **given: Any) -> dict[int, Any]:
        return {}

    def advance(self, new: int) -> None:
        """Nothing to do."""


class MixedForward(DecoderForward):
    """Runs calls with a cache; `layers` by their `LayerForward`, all others as they are."""

    partial = True
    convention = CallingConvention(dict, False, None)  # what else there is to one is stock's

    def adopt(self, cache: Any, expected_tokens: int = 0) -> Store:
        """The store under the cache's layers of the fused ones, put there if need be; the others stay. Raises Unfit."""
        if type(cache) is not DynamicCache or cache.offloading or len(cache.layers) <= max(self.places, default=-1):
            raise Unfit(f"a cache of another kind: {type(cache).__name__}")
        if not self.places:
            return Storeless(tokens_in(cache))
        mine = DynamicCache()
        mine.layers = [cache.layers[place] for place in self.places]
        if tokens_in(cache) != tokens_in(mine):
            raise Unfit("cache layers of different lengths")
        store = super().adopt(mine, expected_tokens)
        for place, layer in zip(self.places, mine.layers, strict=True):
            cache.layers[place] = layer
        return store

    def why_stock(self, kwargs: dict, unknown: str) -> str | None:
        """As of all layers; but where code within them writes to the cache, no call may run stock halfway through."""
        within = any(layer.spec.keeps_more for layer in self.layers)
        return unknown if within else super().why_stock(kwargs, unknown)

    def shapes(self) -> tuple[LayerShape, ...]:
        return super().shapes() if self.places else ()

    def _cached(self) -> Sequence[int]:
        return self.places

    def ready(self, stack: bool = True) -> None:
        """As of all layers, but looks at those alone that are fused: of the others nothing is taken for granted."""
        if len(self._stack()) != len(self.layers):
            self.seen = None
        super().ready(stack)

    def _fingerprint(self) -> Fingerprint:
        return Fingerprint(nn.ModuleList(self._stack()), watched=self.model_guard)

    def _stack(self) -> list[nn.Module]:
        mine = {id(layer.module) for layer in self.layers}
        return [module for module in self.module.get_submodule(self.stack) if id(module) in mine]
