"""Reversible changes to one object: an attribute, or the memory layout of weights.

Every change knows what was there before, "nothing" included, so undoing it leaves no trace.
"""

import enum
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from accel.errors import PatchConflict
from accel.in_flight import join_trial
from accel.libraries.hooks import forward_slots, hook_of
from accel.parallel.sharded_layers import known
from accel.patching.owner import OWNER, Mark
from accel.patching.structure import own_forward, stock_method


class Sentinel(enum.Enum):
    """`MISSING` marks an attribute that was not there; an enum member survives pickle and deepcopy as itself."""

    MISSING = "missing"


MISSING = Sentinel.MISSING


class Change(Protocol):
    """Something that is done to an object and undone exactly; `Patch` is the usual one."""

    def apply(self) -> None:
        """Raises where it cannot be; the object is then as it was."""

    def check(self) -> None:
        """Raises PatchConflict where undoing would throw away what somebody did since."""

    def undo(self) -> None: ...


class Patch:
    """Sets `vars(owner)[name]` on one instance, never on a class; undo restores the old value or its absence."""

    def __init__(self, owner: Any, name: str, value: Any):
        self.owner, self.name, self.value = owner, name, value
        self.before: object = MISSING
        self.marks = False  # the first of its owner's, which is the last to be undone
        self.mark: Mark | None = None  # while it is not in place, where another reference to it would say too much

    def apply(self) -> None:
        self._mark()  # first: it says who may run the value
        self.before = vars(self.owner).get(self.name, MISSING)
        vars(self.owner)[self.name] = self.value

    def check(self) -> None:
        """Raises PatchConflict unless the attribute is still what `apply` put there, or the class's own method."""
        current = vars(self.owner).get(self.name, MISSING)
        if current is not self.value and not stock_method(self.owner, current, self.name):
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

    def _mark(self) -> None:
        self.marks = OWNER not in vars(self.owner)
        if self.marks:
            mark = vars(self.owner)[OWNER] = self.mark or Mark(self.owner)
            self.mark = None
            join_trial(mark)

    def _unmark(self) -> None:
        if self.marks:
            self.mark = vars(self.owner).pop(OWNER, None)


class ForwardPatch(Patch):
    """Replaces the forward of one module, underneath the hooks of accelerate and diffusers where there are any.

    Both keep the forward they wrap, see `forward_slots`;
    and a hook that comes after us keeps ours there. All these places are looked at, so hooks and patches may come and
    go in any order. A fast forward that is to stand in place of accelerate's wrapper has it as `around`.
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
        if not self._places(lambda value: value is self.value):
            if getattr(self.value, "around", None) is not None and self._stock():
                return  # accelerate's hook was taken off, and this with it
            self.name = "forward"
            super().check()

    def undo(self) -> None:
        for holder, name in self._places(lambda value: value is self.value):
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

    Of a layer that is divided among ranks, what transformers put there is the stock one.
    """
    patch = ForwardPatch(module, None)
    if "forward" not in vars(module) or patch._places(lambda value: stock_method(module, value)):
        return None
    if known(module):
        return None
    return f"its forward was replaced ({own_forward(module)})"


def set_data(parameter: torch.Tensor, change: Callable[..., torch.Tensor]) -> None:
    """parameter.data = change(parameter.data): an ordinary tensor stays one under inference mode, as an inference
    tensor does outside of it. One with the data of the other kind would have no version, and not say so.
    """
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.data = change(parameter.detach())


def unshare(tensor: torch.Tensor) -> None:
    """Gives a tensor that lies in one storage with others its own."""
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        set_data(tensor, torch.clone)
