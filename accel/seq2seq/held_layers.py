"""Layers of caches whose keys and values lie in the fixed memory: of callers, and those that a model sees in a step."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from accel.libraries.cache import DynamicLayer, DynamicSlidingWindowLayer

ASKED = "a step asks how many tokens came before it"


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


class Length:
    """Tokens before a step, as the model counts them: a number on the device, `at`, (1,) int64, from `least` to `most`.

    What follows from these bounds is answered without it: whether a table of positions is long enough. Other questions
    raise ValueError.
    """

    def __init__(self, at: torch.Tensor, least: int, most: int):
        self.at, self.least, self.most = at, least, most

    def __add__(self, other: int) -> "Length":
        return Length(self.at + other, self.least + other, self.most + other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Functions of torch are given the tensor; a range that begins and ends here has a size that is known."""
        if func is torch.arange and len(args) == 2 and all(isinstance(one, cls) for one in args):
            first, end = args
            return first.at + torch.arange(end.least - first.least, **(kwargs or {}))
        tensors = (one.at[0] if isinstance(one, cls) else one for one in args)
        return func(*tensors, **(kwargs or {}))

    def __gt__(self, other: Any) -> bool:
        if isinstance(other, int) and not self.least <= other < self.most:
            return self.least > other
        raise ValueError(ASKED)

    def __int__(self) -> int:
        raise ValueError(ASKED)

    __index__ = __int__

    def __lt__(self, other: Any) -> bool:
        return not self > other - 1

    def __ge__(self, other: Any) -> bool:
        return self > other - 1

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __bool__(self) -> bool:
        return self > 0

    def __eq__(self, other: Any) -> bool:
        return self >= other and self <= other

    __hash__ = None  # type: ignore[assignment]


class Place:
    """length: of what there is before a step's token, which goes behind it."""

    length: Length


class FixedLayer(DynamicLayer):
    """What the model is shown of one layer in a step: all of its room."""

    def __init__(self, kept: torch.Tensor, place: Place | None):
        """place: None for what no step writes."""
        super().__init__()
        self.keys, self.values = kept
        self.place, self.is_initialized = place, True
        self.written: Any = None  # the length at which it was

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        if self.place is None:
            raise ValueError("a step writes to the keys and values of what the encoder gave")
        if self.written is self.place.length:  # by a copy of its layer
            raise ValueError("two layers write to one place of the cache")
        self.written = self.place.length
        self.keys.index_copy_(2, self.place.length.at, key_states)
        self.values.index_copy_(2, self.place.length.at, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        return self.keys.shape[2] if self.place is None else self.place.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0
