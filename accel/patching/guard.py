"""Guards: what fused code relies on in stock, noted when it is matched and compared before it runs.

A fused forward does the work of modules that it does not call. It was compared with stock once. So it is valid as long
as everything that only stock code reads is as it was then:

- the class of each part: the module itself, those whose work is done, an attention's processor;
- the code that these classes run: methods, functions of files and of torch, registries (`code.py`);
- settings: attributes of a part, its submodules, and methods that an instance has in place of its class's;
- what a part that is not called would do besides: hooks, on it or on all modules, another forward, training;
- of language models also the configurations and their fields (`llm/generation/model_guard.py`).

Weights are not compared: fused forwards read them in place. What is computed from weights ahead of a call goes by their
versions (`fusion/stacked_linears.py`), a CUDA graph by their addresses (`cuda_graphs/fingerprint.py`).

| who | what is noted | compared |
|---|---|---|
| a block, a norm, experts, a router | `Guard`: its parts and their classes' code | at each call of it |
| a decoder layer | `LayerGuard`: its modules by name | before each forward of the model |
| a language model | `ModelGuard`: configurations, all code, modules around the layers | the same |
| a module called as it is | its class and the forward found there | at each call: `FastForward.changed` |

A guard is asked in two steps. A `Snapshot`, for a whole model a `Fingerprint`, holds the present values as lists, which
are compared in microseconds. If they differ, the guard compares in detail. If something has changed, the stock forward
runs for that call, which the report counts under "... was changed after accel.optimize". What is put back is fast
again. A copy of a model takes over what was noted; it stays stock if something had changed when it was made.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from accel.casting import Cast, casts_of
from accel.errors import reason_of
from accel.in_flight import GATE
from accel.libraries.adapters import DOWN
from accel.libraries.code import GRADIENTS
from accel.libraries.hooks import REGISTRY
from accel.patching.code import ClassCode, Code
from accel.patching.owner import OWNER
from accel.patching.snapshot import Snapshot
from accel.patching.structure import (
    TRAINING_INSIDE,
    another_kind,
    has_hooks,
    mentioned,
    overridden,
    stock_method,
    tampered,
    trains,
)

BASE = frozenset(vars(nn.Module()))  # what every module has; of these hooks and submodules are looked at
IRRELEVANT = {*GRADIENTS, "forward", "config", OWNER, GATE, REGISTRY}  # whose hooks show as another forward
# On which thread a quantized linear computes in another way, see `quantization/module.py`.
OTHERWISE = {"exact_on", "unrounded_on"}
THERE = "there"
ABSENT = object()


def changed_since(what: str) -> str:
    """The reason of a fallback, in one wording."""
    return f"{what} was changed after accel.optimize"


def another_class(before: type, now: type) -> str:
    """What was changed, of an object of another class."""
    return f"{another_kind(now, before)}: the class"


def same(value: object, before: object) -> bool:
    """Whether a value is the same: identical, or equal and of one type. Tensors by identity, in dictionaries too."""
    if value is before:
        return True
    if type(value) is not type(before) or isinstance(value, torch.Tensor):
        return False
    try:
        if isinstance(value, dict) and isinstance(before, dict):  # a scale may be a tensor now, which equals a number
            return value.keys() == before.keys() and all(same(one, before[name]) for name, one in value.items())
        return bool(value == before)
    except Exception as error:  # what cannot say whether it equals something
        reason_of(error)
        return False


class Parts(NamedTuple):
    """Modules and processors whose work a fused forward does without calling them; None for a missing one.

    fixed: those whose settings it does not read. live: those whose settings it reads at every call, as their own code
    does, so that only their class and methods count. answered: layers that it calls where they are of another class.
    """

    fixed: tuple = ()
    live: tuple = ()
    answered: tuple = ()


class PartRecord(NamedTuple):
    """One part. overridden: a method that the instance itself has. settings: empty where they do not count."""

    kind: type
    overridden: str | None
    settings: dict[str, object]

    def others(self, now: "PartRecord") -> list[str]:
        """Names of the settings that have changed. None counts as missing, as FreeU leaves it behind."""
        before, after = self.settings, now.settings
        return [name for name in before | after if not same(after.get(name), before.get(name))]


class Guard:
    """The parts of one fused forward, and the code of their classes, as they were when it was matched.

    It survives pickle and deepcopy: it keeps classes, names and values, no modules.
    """

    def __init__(self, parts: Parts, code: type[Code] = ClassCode):
        self.records = tuple(_records(parts))
        self.code = code(type(part) for part in chain(*parts) if part is not None)
        self.snapshot: PartsSnapshot | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"snapshot": None}

    def changed(self, own: nn.Module | None, parts: Callable[[], Parts]) -> str | None:
        """How the parts differ from what was matched. Takes microseconds unless something has changed since.

        own: the part that is called, so that its hooks run and its forward is the fused one.
        """
        snapshot = self.snapshot
        try:
            if snapshot is not None and snapshot.holds():
                return snapshot.reason
            now = parts()
            snapshot = PartsSnapshot(own, now, self.code)  # first: a change meanwhile shows at the next call
            what = self._another(now)
            snapshot.reason = changed_since(what) if what is not None else _does_more(own, now)
            self.snapshot = snapshot
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            # A part is gone, or another thread changed a container meanwhile.
            return changed_since(f"its make ({error})")
        return snapshot.reason

    @property
    def casts(self) -> tuple[Cast, ...]:
        """Of the parts, as they were found last, layers whose weights are stored in fewer bits."""
        return () if self.snapshot is None else self.snapshot.casts

    def _another(self, parts: Parts) -> str | None:
        """What is not as it was."""
        now = tuple(_records(parts))
        if len(now) != len(self.records):
            return "the number of its parts"
        for before, after in zip(self.records, now, strict=True):
            if after.kind is not before.kind:
                return another_class(before.kind, after.kind)
        if (replaced := self.code.changed()) is not None:
            return replaced
        known: set[str] | None = None
        for before, after in zip(self.records, now, strict=True):
            name = None if before.overridden == after.overridden else after.overridden or before.overridden
            others = before.others(after) if name is None else []
            if others and known is None:  # attributes that the code does not read do not count
                known = mentioned([record.kind for record in self.records])
            name = name or next((other for other in others if other in (known or ())), None)
            if name is not None:
                return f"{before.kind.__name__}.{name}"
        return None


class PartsSnapshot(Snapshot):
    """The parts as they were at some call, and what was found then; compared at every call."""

    def __init__(self, own: nn.Module | None, parts: Parts, code: Code):
        self.reason: str | None = None
        every = [part for part in chain(*parts) if part is not None]
        each = (part.modules() if hasattr(part, DOWN) else (part,) for part in every if part is not own)
        self.casts = casts_of(chain.from_iterable(each))
        containers = list(chain.from_iterable(_containers(part, part is own) for part in every))
        for part in parts.fixed:
            held = (value for name, value in getattr(part, "__dict__", {}).items() if name not in BASE)
            containers += filter(_changeable, held)
        attributes = (getattr(part, "__dict__", {}).values() for part in every)
        super().__init__(every, [*attributes, *code.views()], containers)


class LayerGuard:
    """The modules of a layer as they were when it was understood, by their names in it.

    live: names of modules that are called, or checked by the code that reads their weights; their insides are left out.
    answered: names of modules that are called if their type, settings or hooks have changed.
    """

    def __init__(self, layer: nn.Module, live: Iterable[str], answered: Iterable[str]):
        live = tuple(live)
        self.answered = frozenset(answered)
        self.records = {
            name: _record_with_buffers(module)
            for name, module in layer.named_modules()
            if not any(name == one or name.startswith(f"{one}.") for one in live)
        }

    def join(self, other: "LayerGuard") -> None:
        """Is one of both: `other` is of another part of the layer, whose modules are live or answered too."""
        self.records = {name: record for name, record in self.records.items() if name in other.records}
        self.answered |= other.answered

    def numbers(self, layer: nn.Module) -> list[torch.Tensor]:
        """Buffers of one number each, by which it goes: they may change in place."""
        held = (one for name in self.records for one in layer.get_submodule(name)._buffers.values())
        return [one for one in held if one is not None and not (one.dim() or one.is_inference())]

    def changed(self, layer: nn.Module) -> str | None:
        """What is another now."""
        modules = dict(layer.named_modules())
        for name, before in self.records.items():
            module = modules.get(name)
            if module is None:
                return changed_since(f"{name}, which is gone,")
            now = _record_with_buffers(module)
            others = set(before.others(now)) - OTHERWISE  # of linears that the layer does not use
            if name in self.answered:
                values = (record.settings.get(other, ABSENT) for other in others for record in (before, now))
                if now.kind is not before.kind or any(map(plain_value, values)):
                    continue
            if now.kind is not before.kind:
                return changed_since(f"{name or 'it'}: {another_class(before.kind, now.kind)}")
            if others:
                return changed_since(".".join(filter(None, (name, min(others)))))
            reason = None if name in self.answered else has_hooks(module, called=not name)
            if reason is not None:
                return f"{name or 'it'} has {reason}"
        return None


def _records(parts: Parts) -> Iterator[PartRecord]:
    members = {id(part) for part in chain(*parts) if part is not None}
    for part in parts.fixed:
        yield PartRecord(type(part), overridden(part), settings_of(part, members))
    for part in parts.live:
        yield PartRecord(type(part), overridden(part), {})


def settings_of(part: object, members: set[int] | frozenset[int] = frozenset()) -> dict[str, object]:
    """Attributes by name; of submodules, and of members (ids of other parts), only that they are there."""
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


def _does_more(own: nn.Module | None, parts: Parts) -> str | None:
    """Why calling the parts would do more than their classes say."""
    members = {id(part) for part in chain(*parts)}
    for part in chain(*parts):
        if isinstance(part, nn.Module) and part is not own:
            training = part.training and all(part is not one for one in parts.answered) and _trains(part, members)
            reason = TRAINING_INSIDE if training else tampered(part, stored=True)
            if reason is not None:
                return reason
    return None


def _trains(part: nn.Module, members: set[int]) -> bool:
    """Whether a part, or a module inside that is no part, may compute something else in training mode."""
    return trains(part) or any(id(child) not in members for child in part.children())


def _containers(part: object, called: bool) -> Iterator:
    """Containers of a module that calling it reads: submodules, those in lists, hooks."""
    if isinstance(part, nn.Module):
        attributes = vars(part)
        yield attributes["_modules"]
        yield from (vars(one)["_modules"] for one in attributes["_modules"].values() if isinstance(one, nn.ModuleList))
        if not called:
            yield attributes["_forward_hooks"]
            yield attributes["_forward_pre_hooks"]


def _record_with_buffers(module: nn.Module) -> PartRecord:
    """Settings without tensors and modules in plain attributes, and buffers by their content."""
    values = settings_of(module).items()
    found = {k: v for k, v in values if not isinstance(v, torch.Tensor | nn.Module)}
    return PartRecord(type(module), None, found | {k: _content(v) for k, v in module._buffers.items() if v is not None})


def _content(buffer: torch.Tensor) -> tuple:
    """Equal for equal content. Empty for tables of floats, which are read in place, and weights in fewer bits."""
    if buffer.is_meta or (buffer.is_floating_point() and buffer.dim()) or buffer.dtype in (torch.int8, torch.uint8):
        return ()
    if buffer.is_floating_point():  # such as a bound
        return (repr(buffer.item()),)
    return tuple(buffer.shape), hashlib.sha1(buffer.detach().cpu().contiguous().numpy().tobytes()).digest()


def plain_settings(module: nn.Module) -> tuple:
    """The module's type and its numbers, strings and switches, by name; not whether it is in training mode."""
    named = ((name, value) for name, value in vars(module).items() if name != "training" and plain_value(value))
    return type(module), *sorted(named)


def as_understood(module: nn.Module, known: tuple) -> bool:
    """Whether a module may be computed from its weights still: of these settings, without hooks, not in training."""
    return plain_settings(module) == known and tampered(module) is None and not trains(module)


def plain_value(value: object) -> bool:
    """Whether it is a number, a text, a truth value or None."""
    return value is None or isinstance(value, bool | int | float | str)
