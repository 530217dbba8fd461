"""What a fused forward took for granted in its stock module when it was matched, compared at every call.

A fused block does the work of modules that it does not call. Whatever their code would read, and the fused one does
not, must be as it was: classes, the methods found on them, settings, and which submodules there are.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import ModuleType
from typing import NamedTuple

from torch import nn

from accel.errors import reason_of
from accel.patching.structure import (
    mentioned,
    methods,
    overridden,
    own_classes,
    stock_method,
    tampered,
    torch_functions,
)

BASE = frozenset(vars(nn.Module()))  # what every module has; of these `Reads` looks at hooks and submodules
# Read with gradients alone, with which no fused forward runs.
IRRELEVANT = {"gradient_checkpointing", "_gradient_checkpointing_func", "forward"}
THERE = "there"
PLAIN = (bool, int, float, complex, str, bytes, tuple, list)


class Parts(NamedTuple):
    """Whose work a fused forward does without calling them; None where there is no such module.

    fixed: modules, and processors, whose settings it does not read. live: modules whose settings it reads at every
    call, as their own code does: only their class and methods count.
    """

    fixed: tuple = ()
    live: tuple = ()


class Reads:
    """The parts of one fused forward as they were when it was matched.

    It survives pickle and deepcopy: what is kept are classes, names and values, no modules. A copy of what was changed
    is changed too. own: the module that is called, so that its hooks run and its forward is the fused one.
    """

    def __init__(self, own: nn.Module | None, parts: Parts):
        self.matched = tuple(_records(own, parts))
        self.stale: str | None = None
        self.seen: Seen | None = None

    def __getstate__(self):
        # Functions are looked up anew in a copy: those that were replaced since could not be pickled.
        replaced = [record.kind.__name__ for record in self.matched if _replaced(record, _methods(record.kind))]
        stale = f"{replaced[0]} was changed after accel.optimize" if replaced else None
        bare = tuple(record._replace(methods={}) for record in self.matched)
        return {"matched": bare, "stale": self.stale or stale}

    def __setstate__(self, state):
        self.stale, self.seen = state["stale"], None
        self.matched = tuple(record._replace(methods=_methods(record.kind)) for record in state["matched"])

    def changed(self, own: nn.Module | None, parts: Callable[[], Parts]) -> str | None:
        """Why the parts are not what was matched. A few microseconds, unless something changed since the last call."""
        seen = self.seen
        try:
            if seen is not None and seen.holds():
                return seen.reason
            now = parts()
            seen = Seen(own, now)  # first: what changes meanwhile shows at the next call
            seen.reason = self.stale or self._difference(own, now)
            self.seen = seen
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            # A part is gone, or a container changed size while another thread was reading it.
            return f"changed after accel.optimize: {error}"
        return seen.reason

    def _difference(self, own: nn.Module | None, parts: Parts) -> str | None:
        now = tuple(_records(own, parts))
        if len(now) != len(self.matched):
            return "other parts than those matched"
        reason = next(filter(None, map(self._apart, self.matched, now)), None)
        called = (part for part in chain(*parts) if isinstance(part, nn.Module) and part is not own)
        return reason or next(filter(None, map(_called, called)), None)

    def _apart(self, before: "PartRecord", now: "PartRecord") -> str | None:
        """What is not as it was."""
        if now.kind is not before.kind:
            return f"{now.kind.__name__} where {before.kind.__name__} is expected"
        name = now.overridden if now.overridden != before.overridden else _replaced(before, now.methods)
        if name is None and before.settings is not None and now.settings is not None:
            name = next(self._otherwise(before.settings, now.settings), None)
        return None if name is None else f"{before.kind.__name__}.{name} was changed after accel.optimize"

    def _otherwise(self, before: dict, now: dict) -> Iterator[str]:
        """Names whose values differ and that the code mentions: what it does not read is others' mark, or a note."""
        other = [name for name in before | now if not _same(before.get(name), now.get(name))]
        if other:
            known = mentioned([record.kind for record in self.matched])
            yield from (name for name in other if name in known)


class Seen:
    """The parts as they were at some call, and what was found then; asked at every call whether they still are."""

    def __init__(self, own: nn.Module | None, parts: Parts):
        self.reason: str | None = None
        self.parts = [part for part in chain(*parts) if part is not None]
        self.kinds = list(map(type, self.parts))
        self.views = list(_views(own, self.parts, self.kinds))  # live: reading them again shows the present state
        self.values = list(chain.from_iterable(self.views))

    def holds(self) -> bool:
        try:
            return list(map(type, self.parts)) == self.kinds and list(chain.from_iterable(self.views)) == self.values
        except Exception as error:  # changing while it is read, or a value that cannot say whether it equals another
            reason_of(error)
            return False


class PartRecord(NamedTuple):
    """One part. settings: None where they do not count."""

    kind: type
    methods: dict
    overridden: str | None
    settings: dict | None


def _records(own: nn.Module | None, parts: Parts) -> Iterator[PartRecord]:
    members = {id(part) for part in chain(*parts) if part is not None}
    found = {kind: _methods(kind) for kind in set(map(type, chain(*parts)))}
    for part in parts.fixed:
        yield PartRecord(type(part), found[type(part)], overridden(part), _settings(part, members))
    for part in parts.live:
        yield PartRecord(type(part), found[type(part)], overridden(part), None)


def _methods(kind: type) -> dict[str, object]:
    """By name, the methods of a class, and the functions of torch that these would call."""
    functions = {f"{module.__name__}.{name}": vars(module).get(name) for module, name in torch_functions(kind)}
    return methods(kind) | functions


def _settings(part: object, members: set[int]) -> dict:
    """By name; of submodules, and of a value that is a part itself, only that they are there."""
    attributes = {k: v for k, v in getattr(part, "__dict__", {}).items() if not stock_method(part, v, k)}
    if not isinstance(part, nn.Module):
        return attributes
    children = (name for name, child in attributes["_modules"].items() if child is not None)
    values = (pair for pair in attributes.items() if pair[0] not in BASE and pair[0] not in IRRELEVANT)
    return {name: THERE if id(value) in members else value for name, value in values} | dict.fromkeys(children, THERE)


def _called(part: nn.Module) -> str | None:
    """Why calling this part would do more than its class says."""
    return "training mode inside" if part.training else tampered(part)


def _replaced(record: PartRecord, now: dict) -> str | None:
    """The first method or attribute of the class that is another now."""
    if now == record.methods:
        return None
    return next((name for name in (*record.methods, *now) if now.get(name) is not record.methods.get(name)), None)


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and type(a) in PLAIN and a == b)


def _views(own: nn.Module | None, parts: list, kinds: list[type]) -> Iterator:
    for part in parts:
        attributes = getattr(part, "__dict__", {})
        yield attributes.values()
        if isinstance(part, nn.Module):
            children = attributes["_modules"].values()
            yield children
            yield from (vars(child)["_modules"].values() for child in children if isinstance(child, nn.ModuleList))
            if part is not own:
                yield attributes["_forward_hooks"].values()
                yield attributes["_forward_pre_hooks"].values()
    for base in dict.fromkeys(chain.from_iterable(map(own_classes, kinds))):
        yield vars(base).values()
    yield Looked(chain.from_iterable(map(torch_functions, dict.fromkeys(kinds))))


class Looked:
    """What lies in these places, (module, name), whenever it is asked."""

    def __init__(self, places: Iterable[tuple[ModuleType, str]]):
        self.places = [(vars(module), name) for module, name in dict.fromkeys(places)]

    def __iter__(self) -> Iterator:
        return iter([attributes.get(name) for attributes, name in self.places])
