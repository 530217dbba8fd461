"""Layers of a caller's cache whose keys and values lie in the fixed memory."""

import copy
from typing import Any

import torch

from accel.libraries.cache import DynamicLayer, DynamicSlidingWindowLayer


def _in_memory(name: str, which: int) -> Any:
    """An attribute that is read where it lies; set, the layer has its own again."""

    def read(layer: "HeldLayer") -> torch.Tensor:
        return layer.holding.read(layer.part, layer.index)[which]

    def write(layer: Any, value: torch.Tensor) -> None:
        layer.leave()
        setattr(layer, name, value)

    return property(read, write)


class HeldLayer(DynamicLayer):
    """A layer of the caller's cache whose keys and values are in the fixed memory. Whatever changes them but a step or
    another order of rows makes it a layer with its own again.
    """

    holding: Any
    part: int
    index: int
    stock: type[DynamicLayer] = DynamicLayer

    @staticmethod
    def put_into(layer: Any, *place: Any) -> Any:
        """This layer, which is one of these from now on."""
        del layer.keys, layer.values
        layer.__class__ = next(one for one in (HeldLayer, HeldWindow) if one.stock is type(layer))
        layer.holding, layer.part, layer.index = place
        return layer

    def own(self) -> DynamicLayer:
        """A layer with keys and values of its own."""
        layer, held = object.__new__(self.stock), vars(self)
        layer.__dict__ |= {name: one for name, one in held.items() if name not in ("holding", "part", "index")}
        layer.__dict__ |= {"cumulative_length": self.get_seq_length()} if "cumulative_length" in held else {}
        layer.keys, layer.values = self.holding.read(self.part, self.index).clone()
        return layer

    def leave(self) -> None:
        """Is such a layer from now on."""
        self.__dict__, self.__class__ = vars(self.own()), self.stock

    keys, values = _in_memory("keys", 0), _in_memory("values", 1)

    def get_seq_length(self) -> int:
        return self.holding.lengths[self.part]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if beam_idx.shape != (self.holding.rows,):
            super().reorder_cache(beam_idx)
        else:
            self.holding.reorder(self.part, self.index, beam_idx)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.copy, (self.own(),)


class HeldWindow(HeldLayer, DynamicSlidingWindowLayer):
    """The same of a layer with a window, which its text has not passed."""

    stock = DynamicSlidingWindowLayer

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        return self.get_seq_length()

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        self.leave()
        self.cumulative_length = value
