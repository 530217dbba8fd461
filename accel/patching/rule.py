"""What a rule is shown, a site and the context, and what it answers: skip, or a match with its patches.

A patch is a reversible change to one object: an attribute, or the memory layout of weights. It knows what was there
before, "nothing" included, so undoing it leaves no trace.
"""

import enum
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from accel.errors import PatchConflict, reason_of
from accel.in_flight import join_trial
from accel.libraries.hooks import forward_slots, hook_of
from accel.options import Options
from accel.parallel.sharded_layers import known
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import Kernels
from accel.patching.owner import OWNER, Mark, Owned
from accel.patching.probe import Probe
from accel.patching.structure import own_forward, stock_method

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """`path` is the module's name from the model that `optimize` was given or found in a pipeline; "" is that model."""

    path: str
    module: nn.Module

    def children(self) -> Iterator["Site"]:
        for name, child in self.module.named_children():
            yield Site(f"{self.path}.{name}" if self.path else name, child)


@dataclass
class Context:
    """Of one model. shared: objects that several sites use, by class, so that copies and pickles find them again. Its
    first map is the model's own, the second is common to all models that are optimized together.
    """

    options: Options
    kernels: Kernels
    log: FallbackLog
    probe: Probe = field(default_factory=Probe)
    graph_paths: tuple[str, ...] = ()
    shared: ChainMap[type, object] = field(default_factory=lambda: ChainMap({}, {}))

    def for_model(self) -> "Context":
        """The context of one more model: calls are counted apart, and its sites share nothing yet."""
        return replace(self, log=FallbackLog(), shared=ChainMap({}, self.shared.maps[-1]))

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """The one object of this class that the sites share; made when first asked for, as `kind()` unless told how."""
        found = self.find(kind)
        return self.put(kind() if make is None else make()) if found is None else found

    def find(self, kind: type[T]) -> T | None:
        """As `of`; None where there is none yet."""
        found = self.shared.get(kind)
        return found if isinstance(found, kind) else None

    def put(self, one: T) -> T:
        """From now on the sites of the model share this object, under its class."""
        self.shared[type(one)] = one
        return one


class Sentinel(enum.Enum):
    """`MISSING` marks an attribute that was not there; an enum member survives pickle and deepcopy as itself."""

    MISSING = "missing"


MISSING = Sentinel.MISSING


class Change(Protocol):
    """Something that is done to an object and undone exactly; `Patch` is the usual one."""

    def apply(self) -> None:
        """Raises if it is impossible; the object is then as it was."""

    def check(self) -> None:
        """Raises PatchConflict where undoing would lose a later change of somebody else's."""

    def undo(self) -> None: ...


class Patch:
    """Sets `vars(owner)[name]` on one instance, never on a class; undo restores the old value or its absence."""

    def __init__(self, owner: Any, name: str, value: Any):
        self.owner, self.name, self.value = owner, name, value
        self.before: object = MISSING
        self.marks = False  # whether it is the first patch of its owner, which sets and removes the mark
        self.mark: Mark | None = None  # kept while undone; in place there must be one reference to it alone

    def apply(self) -> None:
        self._mark()  # first: it tells who may run the value
        self.before = vars(self.owner).get(self.name, MISSING)
        vars(self.owner)[self.name] = self.value

    def check(self) -> None:
        """Raises PatchConflict unless the attribute is still what `apply` put there, or the class's own method."""
        current = vars(self.owner).get(self.name, MISSING)
        if not self._ours(current) and not stock_method(self.owner, current, self.name):
            raise PatchConflict(
                f"{type(self.owner).__name__}.{self.name} was replaced after accel.optimize by {current!r}; "
                "undo that change first, then call accel.restore"
            )

    def undo(self) -> None:
        if self.before is MISSING:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = self.before
        self._unmark()

    def _ours(self, value: object) -> bool:
        """Whether `apply` put it there, of this plan or an earlier one: around a model for learned prompts, peft keeps
        a method that it found, and puts it back after generate().
        """
        earlier = isinstance(value, Owned) and type(value) is type(self.value) and value.owner is self.owner
        return value is self.value or earlier

    def _mark(self) -> None:
        self.marks = OWNER not in vars(self.owner)
        if self.marks:
            mark = vars(self.owner)[OWNER] = self.mark or Mark(self.owner)
            self.mark = None
            join_trial(mark)

    def _unmark(self) -> None:
        if self.marks:
            self.mark = vars(self.owner).pop(OWNER, None)


class StayingPatch(Patch):
    """Of a method that takes more than stock's: stays where the others are taken out since stock is faster."""


class ForwardPatch(Patch):
    """Replaces the forward of one module, underneath the hooks of accelerate and diffusers where there are any.

    Both keep the forward they wrap, see `forward_slots`; a later hook keeps ours. All these places are searched, so
    hooks and patches may come and go in any order. A fast forward in place of accelerate's wrapper has it as `around`.
    """

    def __init__(self, module: nn.Module, value: Any):
        super().__init__(module, "forward", value)

    def apply(self) -> None:
        places = self._places(lambda value: stock_method(self.owner, value))
        around = getattr(self.value, "around", None)
        if around is not None and vars(self.owner).get("forward") is around:
            places = [(vars(self.owner), "forward")]
        holder, self.name = places[0] if places else (vars(self.owner), "forward")
        self._mark()
        self.before = holder.get(self.name, MISSING)
        holder[self.name] = self.value

    def check(self) -> None:
        if not self._places(self._ours):
            if getattr(self.value, "around", None) is not None and self._stock():
                return  # accelerate's hook was taken off, and this with it
            self.name = "forward"
            super().check()

    def undo(self) -> None:
        for holder, name in self._places(self._ours):
            if name == self.name and self.before is not MISSING:
                holder[name] = self.before
            elif name == "forward" and holder is vars(self.owner):  # nothing was there, or our hook is gone
                del holder[name]
            else:  # a hook was put on top: let it wrap the stock forward
                holder[name] = types.MethodType(type(self.owner).forward, self.owner)
        self._unmark()

    def _stock(self) -> bool:
        return hook_of(self.owner) is None and stock_method(self.owner, vars(self.owner).get("forward"))

    def _places(self, wanted: Callable) -> list[tuple[dict, str]]:
        """(attributes, name) of all places where a forward of the module is kept that is `wanted`."""
        return [(holder, name) for holder, name in forward_slots(self.owner) if wanted(holder.get(name))]


def foreign_forward(module: nn.Module) -> str | None:
    """Why the module's forward may not be replaced: someone else did so, and no hook keeps the stock one.

    In a layer that is divided among ranks, transformers' forward counts as stock.
    """
    patch = ForwardPatch(module, None)
    if "forward" not in vars(module) or patch._places(lambda value: stock_method(module, value)):
        return None
    if known(module):
        return None
    return f"its forward was replaced ({own_forward(module)})"


def set_data(parameter: torch.Tensor, change: Callable[..., torch.Tensor]) -> None:
    """parameter.data = change(parameter.data), which stays an ordinary tensor under inference mode, or an inference
    tensor outside of it. With data of the other kind it would lose its version silently.
    """
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.data = change(parameter.detach())


def unshare(tensor: torch.Tensor) -> None:
    """Gives a tensor that lies in one storage with others its own."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        set_data(tensor, torch.clone)


@dataclass(frozen=True)
class Match:
    """Apply `patches`, then replace this site's forward.

    covers: names of the modules inside whose work the new forward does, so that no other rule sees them; None for all.
    inside: path and rule of those that `patches` give a forward, for the report.
    """

    forward: Any | None = None
    patches: tuple = ()
    covers: tuple[str, ...] | None = None
    note: str = ""
    inside: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Skip:
    """Leave the site stock; the reason goes into the report. Rules are asked about its children in turn."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """`match(site, context)` gives Match, Skip, or None for "not my kind"."""

    name: str
    match: Callable[[Site, Context], Match | Skip | None] = field(repr=False)

    def answer(self, site: Site, context: Context) -> Match | Skip | None:
        """What `match` gives. Its errors are reasons to skip: one unknown block must not break a pipeline."""
        reason = None
        try:
            answer = self.match(site, context)
            if isinstance(answer, Match) and answer.forward is not None:
                reason = answer.forward.remember()
        except Exception as error:
            return Skip(f"could not be examined: {reason_of(error)}")
        return answer if reason is None else Skip(reason)


def first_of(rules: Sequence[Rule], site: Site, context: Context) -> Match | Skip:
    """The match of the first rule that replaces the site's forward; its note names the rule."""
    told, patches = [], ()
    for rule in rules:
        answer = rule.answer(site, context)
        if isinstance(answer, Skip):
            if context.options.strict:
                return Skip(f"{rule.name}: {answer.reason}")
            told.append(f"{rule.name} skipped: {answer.reason}")
        elif isinstance(answer, Match):
            patches += answer.patches
            told.append(f"with {rule.name}" + (f" ({answer.note})" if answer.note else ""))
            if answer.forward is not None:
                return replace(answer, patches=patches, note="; ".join(told))
    return Match(None, patches, covers=(), note="; ".join(told))
