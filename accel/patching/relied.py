"""What a fused forward relies on in stock: noted when it is matched, compared before it runs, told in one wording.

A fused forward does the work of modules that it does not call. It was compared with stock once. So it holds for as long
as all that stock code would read, and the fused one does not, is as it was then. That is this list:

- the class of each part: of the module itself, of those whose work is done, of an attention's processor;
- the code that these classes run: methods, functions of files and of torch, registries (`code.py`);
- settings: attributes of a part, which submodules it has, and a method that one instance has in its class's place;
- what hangs on a part that is not called any more: hooks, on it or on all modules, another forward, training mode;
- of language models also the configurations and their fields (`llm/generation/relied.py`).

Weights are not on it. Fused forwards read them where they lie. What is computed from them ahead of a call goes by their
versions, as autograd counts them (`fusion/stacked_linears.py`), a CUDA graph by their addresses
(`cuda_graphs/fingerprint.py`).

| who | what is noted | compared |
|---|---|---|
| a block, a norm, experts, a router | `Relied`: its parts and their classes' code | at each call of it: a `Snapshot` |
| a decoder layer | `LayerParts`: its modules by name | before each forward of the model: its `Fingerprint` |
| a language model | `ModelRelied`: configurations, all code, what is around the layers | the same |
| a module called as it is | its class and the forward found there | at each call: `FastForward.changed` |

A snapshot and a fingerprint are lists of values, compared by identity in microseconds. Where they differ, the list is
gone through with care. If something on it is another, the stock forward runs for that call, which the report counts
under "... was changed after accel.optimize". What is put back is fast again. A copy of a model takes over what was
noted; it stays stock where something had been changed when it was made.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn

from accel.casting import Cast, casts_of
from accel.errors import reason_of
from accel.in_flight import GATE
from accel.libraries.code import GRADIENTS
from accel.patching.code import ClassCode, Code
from accel.patching.owner import OWNER
from accel.patching.structure import mentioned, overridden, stock_method, tampered, trains

BASE = frozenset(vars(nn.Module()))  # what every module has; of these hooks and submodules are looked at
# Read with gradients alone, with which no fused forward runs; looked at by itself; relied on field by field.
IRRELEVANT = {*GRADIENTS, "forward", "config", OWNER, GATE}
THERE = "there"
TRAINING_INSIDE = "training mode inside"


def changed_since(what: str) -> str:
    """The one wording of a reason."""
    return f"{what} was changed after accel.optimize"


def another_class(before: type, now: type) -> str:
    """What was changed, of an object that is of another class."""
    return f"{now.__name__} where {before.__name__} is expected: the class"


def same(value: object, before: object) -> bool:
    """Whether a value is what it was: itself, or an equal one of its type. Tensors by identity alone."""
    if value is before:
        return True
    if type(value) is not type(before) or isinstance(value, Tensor):
        return False
    try:
        return bool(value == before)
    except Exception as error:  # what cannot say whether it equals something
        reason_of(error)
        return False


class Parts(NamedTuple):
    """Whose work a fused forward does without calling them; None where there is no such module.

    fixed: modules, and processors, whose settings it does not read. live: modules whose settings it reads at every
    call, as their own code does: only their class and methods count.
    """

    fixed: tuple = ()
    live: tuple = ()


class PartRecord(NamedTuple):
    """One part. overridden: the method that the instance has of its own. settings: none where they do not count."""

    kind: type
    overridden: str | None
    settings: dict[str, object]

    def others(self, now: "PartRecord") -> list[str]:
        """Names of the settings that are another now. None is as good as nothing, as FreeU leaves it behind."""
        before, after = self.settings, now.settings
        return [name for name in before | after if not same(after.get(name), before.get(name))]


class Relied:
    """The parts of one fused forward, and the code of their classes, as they were when it was matched.

    It survives pickle and deepcopy: what is kept are classes, names and values, no modules. own: the module that is
    called, so that its hooks run and its forward is the fused one.
    """

    def __init__(self, own: nn.Module | None, parts: Parts, code: type[Code] = ClassCode):
        self.records = tuple(_records(own, parts))
        self.code = code(type(part) for part in chain(*parts) if part is not None)
        self.snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"snapshot": None}

    def changed(self, own: nn.Module | None, parts: Callable[[], Parts]) -> str | None:
        """Why the parts are not what was matched. A few microseconds, unless something changed since the last call."""
        snapshot = self.snapshot
        try:
            if snapshot is not None and snapshot.holds():
                return snapshot.reason
            now = parts()
            snapshot = Snapshot(own, now, self.code)  # first: what changes meanwhile shows at the next call
            what = self._another(own, now)
            snapshot.reason = changed_since(what) if what is not None else _hung(own, now)
            self.snapshot = snapshot
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            # A part is gone, or a container changed size while another thread was reading it.
            return changed_since(f"its make ({error})")
        return snapshot.reason

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Of the parts, as they were found last, layers whose weights are stored in fewer bits."""
        return () if self.snapshot is None else self.snapshot.casts

    def _another(self, own: nn.Module | None, parts: Parts) -> str | None:
        """What is not as it was."""
        now = tuple(_records(own, parts))
        if len(now) != len(self.records):
            return "the number of its parts"
        for before, after in zip(self.records, now, strict=True):
            if after.kind is not before.kind:
                return another_class(before.kind, after.kind)
        replaced = self.code.changed()
        if replaced is not None:
            return replaced
        known: set[str] | None = None
        for before, after in zip(self.records, now, strict=True):
            name = None if before.overridden == after.overridden else after.overridden or before.overridden
            others = before.others(after) if name is None else []
            if others and known is None:  # what code does not read is others' mark, or a note
                known = mentioned([record.kind for record in self.records])
            name = name or next((other for other in others if other in (known or ())), None)
            if name is not None:
                return f"{before.kind.__name__}.{name}"
        return None


class Snapshot:
    """The parts as they were at some call, and what was found then; asked at every call whether they still are."""

    def __init__(self, own: nn.Module | None, parts: Parts, code: Code):
        self.reason: str | None = None
        self.parts = [part for part in chain(*parts) if part is not None]
        self.casts = casts_of(part for part in self.parts if part is not own)
        self.kinds = list(map(type, self.parts))
        # Live: reading them again shows the present state.
        self.views = [*chain.from_iterable(_views(part, part is own) for part in self.parts), *code.views()]
        for part in parts.fixed:
            held = (value for name, value in getattr(part, "__dict__", {}).items() if name not in BASE)
            self.views += (value.values() if isinstance(value, dict) else value for value in filter(_changeable, held))
        self.values = list(chain.from_iterable(self.views))

    def holds(self) -> bool:
        try:
            return list(map(type, self.parts)) == self.kinds and list(chain.from_iterable(self.views)) == self.values
        except Exception as error:  # changing while it is read, or a value that cannot say whether it equals another
            reason_of(error)
            return False


def _records(own: nn.Module | None, parts: Parts) -> Iterator[PartRecord]:
    members = {id(part) for part in chain(*parts) if part is not None}
    for part in parts.fixed:
        yield PartRecord(type(part), overridden(part), settings_of(part, members))
    for part in parts.live:
        yield PartRecord(type(part), overridden(part), {})


def settings_of(part: object, members: set[int] | frozenset[int] = frozenset()) -> dict[str, object]:
    """Attributes by name; of submodules, and of members, other parts by their ids, only that they are there."""
    attributes = {k: v for k, v in getattr(part, "__dict__", {}).items() if not stock_method(part, v, k)}
    if not isinstance(part, nn.Module):
        return {name: _kept(value) for name, value in attributes.items()}
    children = {name: None if child is None else THERE for name, child in attributes["_modules"].items()}
    values = (pair for pair in attributes.items() if pair[0] not in BASE and pair[0] not in IRRELEVANT)
    found = {name: THERE if id(value) in members else _kept(value) for name, value in values}
    return found | children


def _kept(value: object) -> object:
    """What can be changed in place as it is now."""
    return copy.copy(value) if _changeable(value) else value


def _changeable(value: object) -> bool:
    return type(value) in (dict, list, set)


def _hung(own: nn.Module | None, parts: Parts) -> str | None:
    """Why calling the parts would do more than their classes say."""
    members = {id(part) for part in chain(*parts)}
    for part in chain(*parts):
        if isinstance(part, nn.Module) and part is not own:
            reason = TRAINING_INSIDE if part.training and _trains(part, members) else tampered(part, stored=True)
            if reason is not None:
                return reason
    return None


def _trains(part: nn.Module, members: set[int]) -> bool:
    """Whether a part, or one inside it that is not looked at, may compute something else in training mode.

    Modules are made in training mode, as those of an adapter are.
    """
    return trains(part) or any(id(child) not in members for child in part.children())


def _views(part: object, called: bool) -> Iterator:
    attributes = getattr(part, "__dict__", {})
    yield attributes.values()
    if isinstance(part, nn.Module):
        children = attributes["_modules"].values()
        yield children
        yield from (vars(child)["_modules"].values() for child in children if isinstance(child, nn.ModuleList))
        if not called:
            yield attributes["_forward_hooks"].values()
            yield attributes["_forward_pre_hooks"].values()
