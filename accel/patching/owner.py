"""Keeps patches of an instance from acting for its shallow copies, whose `__dict__` holds them too.

Python passes an attribute of an instance no `self`. So `copy.copy(model)`, a replica of nn.DataParallel, or an object
that took over another's `__dict__` would call what is bound to the original. A mark in the owner's `__dict__` prevents
it. `copy.copy` asks the mark what to copy, which leaves patches out. Other copies show in the number of references to
the mark, which each call reads in a fraction of a microsecond. Only if there may be a copy is the caller looked up: the
module whose `__call__` runs, or the object in the caller's expression, `schedulers[i]` in `schedulers[i].step(...)`. A
copy runs the code of its class, and the patches are removed from it.
"""

import copy
import dis
import inspect
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Iterator
from functools import lru_cache
from traceback import walk_stack
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch import nn

from accel.errors import reason_of
from accel.in_flight import Permit

PLAN = "_accel_plan"  # where an object keeps its plan; copies and pickles of the object take it along
OWNER = "__getstate__"  # the place of the mark, where copy and pickle ask for what an object consists of
ALONE = 2  # references to a mark that one `__dict__` alone holds: that, and the argument of the function that counts
CALL = nn.Module.__call__.__code__  # type: ignore[attr-defined]
ARITHMETIC = MappingProxyType(
    {
        "[]": operator.getitem,
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "%": operator.mod,
        "//": operator.floordiv,
    }
)


class Mark(Permit):
    """Stands for `__getstate__` in the `__dict__` of its owner; any other holder is a shallow copy.

    A deep copy or pickle of it belongs to the owner's copy. lone: that is one of a part of a model, and in no plan.
    """

    def __init__(self, owner: object, lone: bool = False):
        self.owner, self.lone = weakref.ref(owner), lone

    def __reduce__(self) -> tuple:
        return Mark, (self.owner(), _copies_a_part(sys._getframe(1)))

    def __call__(self) -> Any:
        frame = sys._getframe(1)
        one = next((one for one in map(frame.f_locals.get, ("x", "obj", "self")) if _holds(one, self)), self.owner())
        disown(one)
        stock = getattr(type(one), OWNER, vars)  # none before Python 3.11
        state = stock(one)
        if frame.f_code is not copy.copy.__code__ or type(state) is not dict or OWNER not in state:
            return state
        state = state.copy()
        clean(state)
        return state


class PartlyCopied:
    """A copy or pickle keeps the attributes named in `copied`; `renew` sets all others, in a new object too."""

    copied: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.renew()

    def renew(self) -> None:
        """Sets what copies do not keep."""


class Owned(ABC):
    """What is put into the `__dict__` of one instance, and acts for that one alone."""

    @property
    @abstractmethod
    def owner(self) -> Any: ...


class InstanceMethod(Owned):
    """Callable that stands in `vars(owner)[name]`, with the signature of its class's method, which a shallow copy of
    the owner that holds it runs.

    Subclasses give `call`, for calls of the owner. shared: copies keep it, and it acts for them too; such a class takes
    its owner alone.
    """

    name: str
    shared = False
    computes = True  # running its methods counts as a call of its owner, see `in_flight.py`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.shared:
            other = caller(self, sys._getframe(1))
            mine = other is None or other is self.owner or type(other) is not type(self.owner)
            return (self if mine else type(self)(other)).call(*args, **kwargs)  # type: ignore[call-arg]
        if not torch.compiler.is_compiling() and sys.getrefcount(vars(self.owner).get(OWNER)) > ALONE:
            mark = vars(self.owner).get(OWNER)
            if isinstance(mark, Mark) and mark.refuses():
                return self.stock(*args, **kwargs)
            other = caller(self, sys._getframe(1))
            if other is not None and other is not self.owner and disown(other):
                return getattr(other, self.name)(*args, **kwargs)
        return self.call(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return _signature(getattr(type(self.owner), self.name))

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """What the owner's class does."""
        return getattr(type(self.owner), self.name)(self.owner, *args, **kwargs)

    @abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any: ...


@lru_cache(256)
def _signature(method: Any) -> inspect.Signature:
    """Without self. Kept, since a text's beginning asks for some ten of them, half a millisecond each."""
    stock = inspect.signature(method)
    return stock.replace(parameters=list(stock.parameters.values())[1:])


def disown(obj: object) -> bool:
    """Removes patches from an object if no plan is for it: a shallow copy, or a deep one of a part alone, as peft makes
    of a head that adapters train. Returns whether it is one.
    """
    mark = vars(obj).get(OWNER)
    if not isinstance(mark, Mark) or (mark.owner() is obj and not mark.lone):
        return False
    clean(vars(obj))
    return True


def clean(attributes: dict[str, Any]) -> None:
    """Removes patches from the attributes of a copy; what another library had in their place is put back."""
    for name, value in attributes.copy().items():
        if name == OWNER or (isinstance(value, Owned) and not getattr(value, "shared", False)):
            around = getattr(value, "around", None)
            if around is None:
                attributes.pop(name, None)
            else:
                attributes[name] = around


def disown_inside(obj: object) -> None:
    """The same for an object and all modules in it."""
    for one in obj.modules() if isinstance(obj, nn.Module) else (obj,):
        disown(one)


def _copies_a_part(frame: FrameType) -> bool:
    """Whether a deep copy is under way in this frame, and of no object that has a plan."""
    copied = [one.f_locals["x"] for one, _ in walk_stack(frame) if one.f_code is copy.deepcopy.__code__]
    return bool(copied) and not any(PLAN in getattr(one, "__dict__", ()) for one in copied)


def caller(held: object, frame: FrameType) -> object | None:
    """The object as whose attribute `held` is called from this frame; None where that does not show."""
    back = frame.f_back
    if back is not None and back.f_code is CALL:
        return back.f_locals["self"]
    found = next((one for one in _candidates(frame) if _holds(one, held)), None)
    if found is None:  # by another name: of the one variable that has it
        holders = {id(one): one for one in frame.f_locals.values() if _holds(one, held)}
        found = next(iter(holders.values())) if len(holders) == 1 else None
    return found


def _candidates(frame: FrameType) -> Iterator[object]:
    steps = _receiver(frame.f_code, frame.f_lasti)
    if steps:
        yield _evaluated(steps, frame)
    yield frame.f_locals.get("self")


def _holds(candidate: object, held: object) -> bool:
    return any(value is held for value in getattr(candidate, "__dict__", {}).copy().values())


@lru_cache(maxsize=256)  # of the few places that call what accel has put on instances
def _receiver(code: CodeType, last: int) -> tuple[dis.Instruction, ...]:
    """The instructions that load x in the call `x.name(...)` that is under way; none where it is another expression.

    Those of the callee are the ones before the call that begin where it begins in the source, and what they load.
    """
    found = [one for one in dis.get_instructions(code) if one.offset <= last]
    places = [getattr(one, "positions", None) for one in found]  # since Python 3.11
    if not places or places[-1] is None or places[-1].col_offset is None:
        return ()
    start = places[-1][0], places[-1][2]
    begins = [i for i, place in enumerate(places[:-1]) if place is not None and (place[0], place[2]) == start]
    loads = [i for i in begins if found[i].opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return tuple(found[begins[0] : loads[-1]]) if loads else ()


def _evaluated(steps: tuple[dis.Instruction, ...], frame: FrameType) -> object:
    """What they load: names, attributes and items. None where there is more to it, which is not to be run twice."""
    scope = ChainMap(frame.f_locals, frame.f_globals, frame.f_builtins)
    stack: list[Any] = []
    try:
        for step in steps:
            kind = step.opname
            if kind.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
                names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
                stack += [scope[name] for name in names]
            elif kind in ("LOAD_CONST", "LOAD_SMALL_INT"):
                stack.append(step.argval)
            elif kind == "LOAD_ATTR":
                stack.append(getattr(stack.pop(), step.argval))
            elif kind in ("BINARY_SUBSCR", "BINARY_OP"):
                key, whole = stack.pop(), stack.pop()
                stack.append(ARITHMETIC[step.argrepr or "[]"](whole, key))
            elif kind not in ("PUSH_NULL", "NOP", "CACHE", "EXTENDED_ARG"):
                return None
        return stack[-1]
    except Exception as error:  # the names mean something else by now
        reason_of(error)
        return None
