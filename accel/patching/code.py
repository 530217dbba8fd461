"""The code that calling a module runs, as a list of the places it is looked up in: methods of classes, names of files.

Somebody may put other code there at any time: `type(module).forward = other`, `modeling_x.apply_rotary = other`,
`functional.linear = other`. Whoever computes in place of the stock code asks whether it is still what it was.
"""

from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from torch import nn

CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "forward")  # by whoever calls a module
OWN = __name__.partition(".")[0]  # whose modules stand in for stock's: what they run is not stock's code
TABLES = ("_local_mapping", "_global_mapping")  # of a registry of transformers


class CodePlace(NamedTuple):
    """One place, and what lies there, None for nothing. label: for a reader; owner: the same for all places of one
    class, file or table.
    """

    label: str
    owner: object
    mapping: Mapping
    name: str
    value: object

    @property
    def changed(self) -> bool:
        return self.mapping.get(self.name) is not self.value


class Code:
    """Follows functions to those they name, within some packages: those of the classes, and of transformers' own code.

    places: what was found. chosen: the names under which functions are looked up in registries, of attention functions
    for one.
    """

    def __init__(self, kinds: Iterable[type], chosen: Iterable[str] = ()):
        kinds = [kind for kind in dict.fromkeys(kinds) if _package(kind.__module__) != OWN]
        self.chosen = tuple(chosen)
        self.packages = {_package(kind.__module__) for kind in kinds} - {"torch"}
        self._places: dict[tuple[object, str], CodePlace] = {}
        self._visited: set[tuple] = set()
        for kind in kinds:
            for name in CALLED:
                self._method(kind, name)

    @property
    def places(self) -> list[CodePlace]:
        return list(self._places.values())

    def _note(self, owner: object, label: str, mapping: Mapping, name: str) -> object:
        owner = id(mapping) if owner is None else owner
        key = owner, name
        if key not in self._places:
            self._places[key] = CodePlace(f"{label}.{name}", owner, mapping, name, mapping.get(name))
        return self._places[key].value

    def _method(self, kind: type, name: str) -> None:
        """What a class has under this name, and the places before it where another would be found first."""
        for base in kind.__mro__[:-1]:
            found = self._note(base, base.__qualname__, vars(base), name)
            if found is not None:
                return None if base is nn.Module else self._follow(found, kind)

    def _follow(self, value: object, kind: type | None = None) -> None:
        """kind: the class whose method it is."""
        value = getattr(value, "fget", None) or getattr(value, "func", value)  # of a property, of a partial
        value = getattr(value, "__func__", value)  # of a static method
        if not isinstance(value, FunctionType) or (value, kind) in self._visited:
            return
        self._visited.add((value, kind))
        for inner in (getattr(value, "__wrapped__", None), *_enclosed(value)):  # what a decorator goes around
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
        for table in TABLES:
            found = getattr(value, table, None)
            if isinstance(found, dict):
                for key in self.chosen:
                    self._follow(self._note(None, type(value).__name__, found, key))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _enclosed(function: FunctionType) -> list[object]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != type(cell)()]


def _names(code: CodeType) -> set[str]:
    """All names in a function and in those written inside it."""
    inside = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inside))
