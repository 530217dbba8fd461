"""A cache that few look into: of a model that makes one by default, and whose caller wants hidden states or a class."""

from collections.abc import Callable
from typing import Any

from accel.libraries.cache import DynamicCache


class LateCache(DynamicCache):
    """Becomes the cache that `make` gives, of its class too, as soon as somebody looks into it."""

    def __init__(self, make: Callable[[], Any]):
        self.__dict__["make"] = make

    def become(self) -> None:
        if (make := self.__dict__.pop("make", None)) is not None:
            made = make()
            self.__class__ = type(made)
            self.__dict__.update(made.__dict__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "make" not in self.__dict__:
            raise AttributeError(name)
        self.become()
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.become()
        return object.__reduce_ex__(self, protocol)
