"""What accelerate's model offload leaves on a pipeline, taken over: the same hooks, in the same order, other moves."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from accel.libraries.hooks import DETACH, ENTER, FORWARD, HOOK, METHODS, hook_of, offload_hooks
from accel.offload.blocks import nbytes, streaming_blocks
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model
from accel.offload.layout import separate
from accel.offload.placed_model import PlacedModel
from accel.offload.streamed_model import StreamedModel
from accel.patching.owner import PartlyCopied
from accel.patching.rule import Patch

GPUS = ("cuda",)
SWITCH = "enable_model_cpu_offload"  # which a pipeline calls itself, at the end of each call


class HookMethod:
    """Stands on one hook in the place of one of its methods, which runs with moves of ours."""

    def __init__(self, hook: Any, name: str, placed: PlacedModel):
        self.hook, self.name, self.placed = hook, name, placed

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self.hook), self.name)
        if self.name == DETACH:
            let_go(self.hook)  # and with it what is kept for the model, unless it gets another hook now
        elif module is self.placed.model and "to" not in vars(module):
            vars(module)["to"] = self.placed.to
            try:
                return method(self.hook, module, *args, **kwargs)
            finally:
                vars(module).pop("to", None)
        return method(self.hook, module, *args, **kwargs)


def comes_to_one_place(module: nn.Module) -> bool:
    """Whether the hook that accelerate has on a module moves it between two places that stay, and does nothing else."""
    placed = _placed(module)
    return placed is not None and placed.reason is None


def moved_by_torch(module: nn.Module) -> str | None:
    """Why a module that comes and goes does not come to one place, if it was tried."""
    placed = _placed(module)
    return None if placed is None else placed.reason


def _placed(module: nn.Module) -> PlacedModel | None:
    method = getattr(hook_of(module), "__dict__", {}).get(ENTER)
    return method.placed if type(method) is HookMethod and method.placed.model is module else None


def beneath_offload(module: nn.Module, others: Iterable[str] = ()) -> Iterator[Any]:
    """The attributes of a module, such a hook and its wrapper left out, and those of these names.

    Every call of a pipeline takes the hooks off and puts new ones on.
    """
    left_out = {*others, *((FORWARD, HOOK) if comes_to_one_place(module) else ())}
    return (value for name, value in vars(module).items() if name not in left_out)


def comes_whole(model: nn.Module, card: int) -> bool:
    """Whether a model of a pipeline that does not fit in so many bytes comes in one piece, as an autoencoder does."""
    return 2 * nbytes(model) <= card or hasattr(model, "decode") or not streaming_blocks(model)


class OffloadSwitch(PartlyCopied):
    """Callable that stands in `vars(pipe)["enable_model_cpu_offload"]`. prepare: see `PlacedModel`. budget: None for
    all of the card.
    """

    copied = ("pipe", "prepare", "wrapped", "budget")

    def __init__(self, pipe: Any, prepare: Callable[[nn.Module, torch.device], None], budget: Budget | None = None):
        self.pipe, self.prepare, self.wrapped, self.budget = pipe, prepare, vars(pipe).get(SWITCH), budget
        self.renew()

    def renew(self) -> None:
        self.models: WeakSet[nn.Module] = WeakSet()  # whose weights may lie in one run of bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self.placed()
        for placed in before:
            placed.leave()  # what it would move itself, one weight after the other
        try:
            if self.wrapped is not None:
                return self.wrapped(*args, **kwargs)
            return getattr(type(self.pipe), SWITCH)(self.pipe, *args, **kwargs)
        finally:
            self.take_over(before)

    def placed(self) -> list[PlacedModel]:
        methods = (vars(hook).get(ENTER) for _, hook in offload_hooks(self.pipe, GPUS))
        return [method.placed for method in methods if type(method) is HookMethod]

    def take_over(self, before: list[PlacedModel]) -> None:
        """The hooks that are on the pipeline's models now move them by us."""
        known = {id(placed.model): placed for placed in before}
        for model, hook in offload_hooks(self.pipe, GPUS):
            placed = known.get(id(model))
            if placed is None or placed.device != hook.execution_device:
                placed = self._place(model, hook.execution_device)
            self.models.add(model)
            for name in METHODS:
                vars(hook)[name] = HookMethod(hook, name, placed)

    def _place(self, model: nn.Module, device: torch.device) -> PlacedModel:
        budget, held = self.budget, streamed_model(model)
        if held is not None and (held.device, held.budget) == (device, budget):
            return held  # whose hook was taken off for a while
        if budget is None or comes_whole(model, budget.card):
            return PlacedModel(model, device, self.prepare)
        return StreamedModel(model, device, self.prepare, budget)

    def let_go(self) -> None:
        """The hooks move the models by themselves again."""
        for placed in self.placed():
            placed.let_go()
        for _, hook in offload_hooks(self.pipe, GPUS):
            let_go(hook)
        for model in self.models:
            if (streamed := streamed_model(model)) is not None:
                streamed.let_go()  # whose hook somebody has taken off
            separate(model)
        self.models.clear()


def let_go(hook: Any) -> None:
    """Takes off what was put on a hook."""
    for name in METHODS:
        if type(vars(hook).get(name)) is HookMethod:
            del vars(hook)[name]


class OffloadPatch(Patch):
    """Hooks that a pipeline has, and those that it gets when its offload is enabled, as it is again by every call."""

    def __init__(self, pipe: Any, prepare: Callable[[nn.Module, torch.device], None], budget: Budget | None = None):
        super().__init__(pipe, SWITCH, OffloadSwitch(pipe, prepare, budget))

    def apply(self) -> None:
        super().apply()
        self.value.take_over([])

    def undo(self) -> None:
        super().undo()
        self.value.let_go()
