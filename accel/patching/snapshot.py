"""The values of objects at one moment, as lists that are compared with the present ones in microseconds."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from operator import is_

import torch

from accel.errors import reason_of

VALUES = chain.from_iterable


class View:
    """The result of a function, which is called at each iteration."""

    def __init__(self, read: Callable[[], Iterable]):
        self.read = read

    def __iter__(self) -> Iterator:
        return iter(self.read())


class Snapshot:
    """The classes of objects, and the values of views: by identity, then equality; tensors by identity alone.

    views: give their present values when iterated over, so that no tree is walked again. containers: lists, sets,
    tuples, and dictionaries, whose values count.
    """

    def __init__(self, objects: Iterable[object], views: Iterable[Iterable], containers: Iterable[Collection] = ()):
        self.objects = list(objects)
        self._kinds = list(map(type, self.objects))
        self._empty: list[Collection] = []  # as most containers of modules are; asked for less than a view is
        self._views: list[Iterable] = []
        # Those with tensors, of which two with one number may be equal; and containers of floats, such as scales of
        # adapters, which a tensor may follow that is equal to one.
        self._exact: list[Iterable] = []
        for view in views:
            self._watch(view, (torch.Tensor,))
        for container in containers:
            if len(container):
                self._watch(container.values() if isinstance(container, dict) else container, (torch.Tensor, float))
            else:
                self._empty.append(container)
        self._values = list(VALUES(self._views))
        self._exact_values = list(VALUES(self._exact))

    def _watch(self, view: Iterable, exact: tuple[type, ...]) -> None:
        (self._exact if any(issubclass(kind, exact) for kind in set(map(type, view))) else self._views).append(view)

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        try:
            return (
                not any(self._empty)
                and list(map(type, self.objects)) == self._kinds
                and list(VALUES(self._views)) == self._values
                and (not self._exact or self._exactly())
            )
        except Exception as error:  # changing while it is read, or a value that cannot say whether it equals another
            reason_of(error)
            return False

    def renewed(self) -> bool:
        """Takes over floats that are others now. Returns False where anything else is, or was."""
        try:
            now, exact = list(VALUES(self._views)), list(VALUES(self._exact))
            alike = not any(self._empty) and list(map(type, self.objects)) == self._kinds
        except Exception as error:  # as in `holds`
            reason_of(error)
            return False
        pairs = (now, self._values), (exact, self._exact_values)
        if not alike or any(len(new) != len(old) or not all(map(_plain, new, old)) for new, old in pairs):
            return False
        self._values, self._exact_values = now, exact
        return True

    def _exactly(self) -> bool:
        found, before = list(VALUES(self._exact)), self._exact_values
        return len(found) == len(before) and (all(map(is_, found, before)) or all(map(_equal, found, before)))


def _plain(value: object, before: object) -> bool:
    return value is before or (type(value) is float and type(before) is float)


def _equal(value: object, before: object) -> bool:
    """Plain values may be new objects: PEFT multiplies an adapter's scale at every call, and divides it again."""
    return value is before or (type(value) is type(before) and type(value) in (float, int, str) and value == before)
