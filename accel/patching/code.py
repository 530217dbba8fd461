"""The code that calling a module runs, as tables of the places where it is looked up: classes, files, registries.

Users may replace it at any time: `type(module).forward = other`, `modeling_x.apply_rotary = other`,
`functional.linear = other`. Fused code, which runs in its place, asks whether it has changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

from accel.libraries.code import function_tables
from accel.patching.structure import enclosed, own_classes, torch_functions, written_in

CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")  # by whoever calls a module
OWN = __name__.partition(".")[0]  # whose modules stand in for stock's: what they run is not stock's code


class CodeTable(NamedTuple):
    """One class, file or registry. before: the values by name, None for a missing one.

    names: those that are looked up in it; None for a class, where all are watched.
    """

    label: str
    mapping: Mapping
    names: tuple[str, ...] | None
    before: dict[str, object]

    def replaced(self) -> str | None:
        """The first name with another value now."""
        now = written_in(self.mapping) if self.names is None else {name: self.mapping.get(name) for name in self.names}
        names = (name for name in self.before | now if now.get(name) is not self.before.get(name))
        return next((f"{self.label}.{name}" for name in names), None)


class Code(ABC):
    """The code of some classes as it was when this was made. A copy takes the code as it is when the copy is made.

    Functions cannot be pickled. So a copy keeps only whether something was replaced, and looks all code up at once.
    """

    def __init__(self, kinds: Iterable[type]):
        self.kinds = tuple(dict.fromkeys(kinds))
        self.stale: str | None = None
        self.tables = tuple(self.find())

    def __getstate__(self) -> dict[str, object]:
        state = {name: value for name, value in vars(self).items() if name != "tables"}
        return state | {"stale": self.changed()}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.tables = tuple(self.find())

    @abstractmethod
    def find(self) -> Iterable[CodeTable]:
        """The tables as they are now."""

    def changed(self) -> str | None:
        """What was replaced."""
        return self.stale or next(filter(None, map(CodeTable.replaced, self.tables)), None)

    def views(self) -> Iterator[Iterable]:
        """Views of all values, which give the present ones when iterated over."""
        yield from (table.mapping.values() for table in self.tables if table.names is None)
        named = [(table.mapping, table.names) for table in self.tables if table.names is not None]
        if named:
            yield NamedValues(named)


class NamedValues:
    """A view of values by names in several mappings."""

    def __init__(self, named: Iterable[tuple[Mapping, Sequence[str]]]):
        pairs = list(named)
        self.getters = [mapping.get for mapping, _ in pairs]
        self.names = [names for _, names in pairs]

    def __iter__(self) -> Iterator:
        return chain.from_iterable(map(map, self.getters, self.names))


class ClassCode(Code):
    """All that is written in these classes and their bases, and the functions of torch that it names."""

    def find(self) -> Iterator[CodeTable]:
        for base in dict.fromkeys(chain.from_iterable(map(own_classes, self.kinds))):
            yield CodeTable(base.__name__, vars(base), None, written_in(vars(base)))
        named: dict[ModuleType, list[str]] = {}
        for module, name in dict.fromkeys(chain.from_iterable(map(torch_functions, self.kinds))):
            named.setdefault(module, []).append(name)
        for module, names in named.items():
            yield CodeTable(
                module.__name__, vars(module), tuple(names), {name: vars(module).get(name) for name in names}
            )


class CalledCode(Code):
    """What a call of these classes runs: functions are followed to those they name, within the classes' packages.

    chosen: names under which functions are looked up in registries, such as of attention functions.
    """

    def __init__(self, kinds: Iterable[type], chosen: Iterable[str] = ()):
        self.chosen = tuple(chosen)
        super().__init__(kind for kind in kinds if _package(kind.__module__) != OWN)

    def find(self) -> list[CodeTable]:
        return _Followed(self.kinds, self.chosen, self.entries()).function_tables()

    def entries(self) -> Iterable[object]:
        """Functions that are followed too, because a call finds them in places unknown here."""
        return ()


class _Followed:
    """A walk from the methods that a call runs."""

    def __init__(self, kinds: Iterable[type], chosen: tuple[str, ...], entries: Iterable[object]):
        self.chosen = chosen
        self.packages = {_package(kind.__module__) for kind in kinds} - {"torch"}
        self._found: dict[object, tuple[str, Mapping, dict[str, object]]] = {}  # by class, file or registry
        self._visited: set[tuple] = set()
        for kind in kinds:
            for name in CALLED:
                self._method(kind, name)
        for entry in entries:
            self._follow(entry)

    def function_tables(self) -> list[CodeTable]:
        return [CodeTable(label, mapping, tuple(found), found) for label, mapping, found in self._found.values()]

    def _note(self, owner: object, label: str, mapping: Mapping, name: str) -> object:
        """The value of a name, noted. owner: of the mapping, where that is a new object at each access."""
        _, _, found = self._found.setdefault(id(mapping) if owner is None else owner, (label, mapping, {}))
        return found.setdefault(name, mapping.get(name))

    def _method(self, kind: type, name: str) -> None:
        """What a class has under this name, and the places before it where another would be found first."""
        for base in kind.__mro__[:-1]:
            if (found := self._note(base, base.__name__, vars(base), name)) is not None:
                return None if base is nn.Module else self._follow(found, kind)

    def _follow(self, value: object, kind: type | None = None) -> None:
        """kind: the class whose method it is."""
        value = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property, of a partial
        value = getattr(value, "__func__", value)  # of a static method
        if not isinstance(value, FunctionType) or (value, kind) in self._visited:
            return
        self._visited.add((value, kind))
        for inner in (getattr(value, "__wrapped__", None), *enclosed(value)):  # what a decorator goes around
            self._follow(inner, kind)
        if kind is None and _package(value.__module__ or "") not in self.packages:
            return
        names = _names(value.__code__)
        for name in sorted(names & value.__globals__.keys()):
            self._global(value.__globals__, name, names)
        if kind is not None:
            own = set().union(*(vars(base) for base in kind.__mro__[:-1] if base is not nn.Module))
            for name in sorted(names & own):
                self._method(kind, name)

    def _global(self, mapping: Mapping, name: str, names: set[str], above: tuple = ()) -> None:
        """names: all that the function names, among them what it takes from a file that it names."""
        value = mapping[name]
        if isinstance(value, ModuleType):
            if value not in above:
                for inner in names & vars(value).keys():
                    self._global(vars(value), inner, names, (*above, value))
            return
        if callable(value):
            self._note(None, mapping.get("__name__", ""), mapping, name)
            self._follow(value)
        for table in function_tables(value):
            for key in self.chosen:
                self._follow(self._note(None, type(value).__name__, table, key))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _names(code: CodeType) -> set[str]:
    """All names in a function and in those written inside it."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inside))
