"""What accelerate's model offload leaves on a pipeline, taken over: the same hooks, in the same order, other moves."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from accel.in_flight import alone
from accel.libraries.hooks import DETACH, ENTER, FORWARD, HOOK, METHODS, hook_of, offload_hooks, remove_hooks
from accel.offload.blocks import nbytes, streaming_blocks
from accel.offload.budget import Budget
from accel.offload.call_hooks import streamed_model
from accel.offload.layout import separate
from accel.offload.placed_model import PlacedModel
from accel.offload.streamed_model import StreamedModel
from accel.patching.owner import PartlyCopied
from accel.patching.rule import Patch
from accel.patching.structure import stock_method

GPUS = ("cuda",)
SWITCH = "enable_model_cpu_offload"  # which a pipeline calls itself, at the end of each call


class HookMethod:
    """Stands on one hook in the place of one of its methods, which runs with moves of ours. switch: of the pipeline."""

    def __init__(self, hook: Any, name: str, placed: PlacedModel, switch: "OffloadSwitch"):
        self.hook, self.name, self.placed = hook, name, placed
        self.switch, self.added = ref(switch), switch.added

    @property
    def forsaken(self) -> bool:
        """Whether no pipeline has the hook: it is gone, or the model was copied, or replaced by another."""
        switch = self.switch()
        return switch is None or all(self.hook is not one for _, one in offload_hooks(switch.pipe, GPUS))

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
    all of the card. added: hooks come with the budget, and go with it.
    """

    copied = ("pipe", "prepare", "wrapped", "budget", "added")

    def __init__(
        self,
        pipe: Any,
        prepare: Callable[[nn.Module, torch.device], None],
        budget: Budget | None = None,
        added: bool = False,
    ):
        self.pipe, self.prepare, self.wrapped = pipe, prepare, vars(pipe).get(SWITCH)
        self.budget, self.added = budget, added
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
                vars(hook)[name] = HookMethod(hook, name, placed, self)

    def _place(self, model: nn.Module, device: torch.device) -> PlacedModel:
        budget, held = self.budget, streamed_model(model)
        if held is not None and (held.device, held.budget) == (device, budget):
            return held  # whose hook was taken off for a while
        if budget is None or comes_whole(model, budget.card):
            return PlacedModel(model, device, self.prepare, budget)
        return StreamedModel(model, device, self.prepare, budget)

    def let_go(self) -> None:
        """The hooks move the models by themselves again."""
        for placed in self.placed():
            placed.let_go()
        for _, hook in offload_hooks(self.pipe, GPUS):
            let_go(hook)
        for model in self.models:
            release_forsaken(model)
            if (streamed := streamed_model(model)) is not None:
                streamed.let_go()  # whose hook somebody has taken off
            separate(model)
        self.models.clear()


def let_go(hook: Any) -> None:
    """Takes off what was put on a hook."""
    for name in METHODS:
        if type(vars(hook).get(name)) is HookMethod:
            del vars(hook)[name]


def release_forsaken(model: nn.Module) -> None:
    """Lets go of a model that came for its turns, in a pipeline that has it no more: who else would?"""
    method = getattr(hook_of(model), "__dict__", {}).get(ENTER)
    if type(method) is HookMethod and method.forsaken:
        with alone(model):
            method.placed.let_go()
            let_go(method.hook)
            if method.added:
                remove_hooks(model)
                clear_stock_forward(model)
            separate(model)


def clear_stock_forward(model: nn.Module) -> None:
    """Takes off the forward that hooks leave, its class's own."""
    if stock_method(model, vars(model).get(FORWARD)):
        del vars(model)[FORWARD]


class OffloadPatch(Patch):
    """Hooks that a pipeline has, and those that it gets when its offload is enabled, as by every call of it. more:
    as of an `OffloadSwitch`.
    """

    def __init__(self, pipe: Any, *more: Any):
        super().__init__(pipe, SWITCH, OffloadSwitch(pipe, *more))

    def apply(self) -> None:
        super().apply()
        self.value.take_over([])

    def undo(self) -> None:
        super().undo()
        self.value.let_go()

    def again(self) -> "OffloadPatch | None":
        """The same for stock models, while this is undone, where there is a budget."""
        budget, added = self.value.budget, self.value.added
        return None if budget is None else OffloadPatch(self.owner, lambda model, device: None, budget, added)
