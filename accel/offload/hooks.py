"""What accelerate's model offload leaves on a pipeline, taken over: the same hooks, in the same order, other moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel.offload.placed_model import PlacedModel
from accel.patching.patch import Patch

KIND = ("accelerate.hooks", "CpuOffload")
GPUS = ("cuda",)
ENTER, LEAVE = "pre_forward", "init_hook"  # of accelerate's `CpuOffload`
SWITCH = "enable_model_cpu_offload"  # which a pipeline calls itself, at the end of each call


class HookMethod:
    """Stands on one hook in the place of one of its methods, which runs with moves of ours."""

    def __init__(self, hook: Any, name: str, placed: PlacedModel):
        self.hook, self.name, self.placed = hook, name, placed

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self.hook), self.name)
        if module is not self.placed.model or "to" in vars(module):
            return method(self.hook, module, *args, **kwargs)
        vars(module)["to"] = self.placed.to
        try:
            return method(self.hook, module, *args, **kwargs)
        finally:
            vars(module).pop("to", None)


def comes_to_one_place(module: nn.Module) -> bool:
    """Whether the hook that accelerate has on a module moves it between two places that stay, and does nothing else."""
    hook = vars(module).get("_hf_hook")
    method = getattr(hook, "__dict__", {}).get(ENTER)
    return type(method) is HookMethod and method.placed.model is module and method.placed.reason is None


class BeneathOffload:
    """The attributes of a module as they are whenever it is asked, such a hook and its wrapper left out.

    Every call of a pipeline takes the hooks off and puts new ones on.
    """

    def __init__(self, module: nn.Module):
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        left_out = ("forward", "_hf_hook") if comes_to_one_place(self.module) else ()
        return (value for name, value in vars(self.module).items() if name not in left_out)


class OffloadSwitch:
    """Callable that stands in `vars(pipe)["enable_model_cpu_offload"]`. prepare: see `PlacedModel`."""

    def __init__(self, pipe: Any, prepare: Callable[[nn.Module, torch.device], None]):
        self.pipe, self.prepare = pipe, prepare
        self.wrapped = vars(pipe).get(SWITCH)
        self.placed: list[PlacedModel] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for placed in self.placed:
            placed.leave()  # what it would move itself, one weight after the other
        try:
            if self.wrapped is not None:
                return self.wrapped(*args, **kwargs)
            return getattr(type(self.pipe), SWITCH)(self.pipe, *args, **kwargs)
        finally:
            self.take_over()

    def take_over(self) -> None:
        """The hooks that are on the pipeline's models now move them by us."""
        known = {id(placed.model): placed for placed in self.placed}
        self.placed = []
        for model, hook in hooks_of(self.pipe):
            placed = known.get(id(model))
            if placed is None or placed.device != hook.execution_device:
                placed = PlacedModel(model, hook.execution_device, self.prepare)
            self.placed.append(placed)
            for name in (ENTER, LEAVE):
                vars(hook)[name] = HookMethod(hook, name, placed)

    def let_go(self) -> None:
        """The hooks move the models by themselves again."""
        for model, hook in hooks_of(self.pipe):
            for name in (ENTER, LEAVE):
                if type(vars(hook).get(name)) is HookMethod:
                    del vars(hook)[name]
        for placed in self.placed:
            placed.forget()
        self.placed = []


def hooks_of(pipe: Any) -> Iterator[tuple[nn.Module, Any]]:
    """(model, hook) of those by which accelerate moves whole models of the pipeline to a GPU."""
    for user_hook in getattr(pipe, "_all_hooks", None) or ():
        model, hook = getattr(user_hook, "model", None), getattr(user_hook, "hook", None)
        if not isinstance(model, nn.Module) or vars(model).get("_hf_hook") is not hook:
            continue
        device = getattr(hook, "execution_device", None)
        known = (type(hook).__module__, type(hook).__name__) == KIND
        if known and isinstance(device, torch.device) and device.type in GPUS:
            yield model, hook


class OffloadPatch(Patch):
    """Hooks that a pipeline has, and those that it gets when its offload is enabled, as it is again by every call."""

    def __init__(self, pipe: Any, prepare: Callable[[nn.Module, torch.device], None]):
        super().__init__(pipe, SWITCH, OffloadSwitch(pipe, prepare))

    def apply(self) -> None:
        super().apply()
        self.value.take_over()

    def undo(self) -> None:
        super().undo()
        self.value.let_go()
