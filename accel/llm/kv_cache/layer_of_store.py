"""What all layers of a cache over a store have in common: they are stock layers that keep nothing themselves."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._dynamo.exc import UnspecializeRestartAnalysis

from accel.llm.kv_cache.shape import LayerShape
from accel.llm.kv_cache.store import RowSelection, Store


def steps_aside(method: Callable) -> Callable:
    """A method or property of a layer. While torch.compile traces it, that of the library's own layer runs instead."""
    name = method.__name__

    @wraps(method)
    def called(self: "LayerOfStore", *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        found = getattr(self.give_way(), name)
        return found(*args, **kwargs) if callable(found) else found

    return called


def leaving(name: str) -> Callable:
    """A method by which a layer becomes a stock one, which then does what it says."""

    def called(self: "LayerOfStore", *args: Any, **kwargs: Any) -> Any:
        self.leave()
        return getattr(self, name)(*args, **kwargs)

    called.__name__ = name
    return steps_aside(called)


def left(name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """The same of a property, which can be assigned. read: gives it, where that takes no stock layer."""

    def leave_and_read(self: "LayerOfStore") -> Any:
        self.leave()
        return getattr(self, name)

    def assign(self: "LayerOfStore", value: Any) -> None:
        self.leave()
        setattr(self, name, value)

    read = read or leave_and_read
    read.__name__ = name
    return property(steps_aside(read), assign)


class LayerOfStore:
    """One layer of a Store. What the store cannot do turns it into a stock layer with the same content.

    The second base of its classes: Python lets an object become one of its first base only. So they name what they take
    from here in the place of stock's.
    """

    def __init__(self, store: Store, index: int):
        self.store, self.index = store, index  # what else a stock layer has is read from the store

    @property
    def shape(self) -> LayerShape:
        return self.store.shapes[self.index]

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def device(self) -> torch.device:
        return self.shape.device

    def _filled(self) -> Any:
        """The stock layer, with tensors of its own; the store drops this one."""
        raise NotImplementedError

    def leave(self) -> None:
        """Becomes the stock layer it stands for, with tensors of its own."""
        stock = self._filled()
        self.__dict__.clear()
        self.__class__ = type(stock)
        self.__dict__.update(vars(stock))

    def give_way(self) -> Any:
        """The stock layer that takes its place in the cache, for a compiler, which traces no change of a class."""
        cache = self.store.cache_ref()
        if cache is None or cache.layers[self.index] is not self or not self.store.readable:
            self.trace_anew()
        cache.layers[self.index] = stock = self._filled()
        return stock

    @torch.compiler.assume_constant_result
    def trace_anew(self) -> None:
        """Becomes a stock layer outside of the trace, which then starts anew."""
        self.leave()
        raise UnspecializeRestartAnalysis  # which starts the trace anew, and from nothing

    @property
    def places(self) -> tuple[int, ...]:
        """The layers of the store that are its own."""
        return (self.index,)

    @steps_aside
    def reset(self) -> None:
        for place in self.places:
            self.store.empty(place)

    @steps_aside
    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._request("reorder", beam_idx)

    @steps_aside
    def batch_repeat_interleave(self, repeats: int) -> None:
        self._request("repeat", repeats)

    @steps_aside
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._request("select", indices)

    def _request(self, kind: str, rows: Any) -> None:
        for place in self.places:
            self.store.request(place, RowSelection(kind, rows))

    def offload(self) -> None:
        """Stays where the kernels read it."""

    def prefetch(self) -> None:
        """Is there."""
