"""What tells a model whose weights stream of its calls, and of its blocks'."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn

from accel.patching.structure import CallersHook

BESIDE = ("mask", "position", "past", "cache")  # arguments that say nothing about how much is computed


class BlockHook(CallersHook):
    """Stands on a block, before its call or behind it. The block is called, so what it does is part of the call."""

    def __init__(self, model: Any, path: str, behind: bool):
        self.model, self.path, self.behind = model, path, behind

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self.model.leave_block(self.path) if self.behind else self.model.take_block(self.path)


class CallHook:
    """Stands on the model itself, before its call or behind it."""

    def __init__(self, model: Any, behind: bool):
        self.model, self.behind = model, behind

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self.model.end_call() if self.behind else self.model.begin_call(given)


def hook_model(streamed: Any) -> None:
    """The model tells of its calls."""
    streamed.model.register_forward_pre_hook(CallHook(streamed, False), with_kwargs=True)
    streamed.model.register_forward_hook(CallHook(streamed, True), always_call=True)


def hook_blocks(streamed: Any, paths: Iterable[str]) -> None:
    """Blocks at these paths, and no others, tell of theirs."""
    unhook(streamed.model, BlockHook)
    for path in paths:
        block = streamed.model.get_submodule(path)
        block.register_forward_pre_hook(BlockHook(streamed, path, False))
        block.register_forward_hook(BlockHook(streamed, path, True), always_call=True)


def unhook(model: nn.Module, kind: type = object) -> None:
    """No hooks of ours of this kind are left."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [
                key for key, one in hooks.items() if isinstance(one, BlockHook | CallHook) and isinstance(one, kind)
            ]:
                del hooks[key]
                for beside in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                    beside.pop(key, None)


def streamed_model(module: nn.Module) -> Any:
    """That of a model whose weights come as they are called."""
    hooks = vars(module)["_forward_pre_hooks"]
    return next((one.model for one in hooks.values() if type(one) is CallHook), None) if hooks else None


def whole_runs(module: nn.Module, forward: Callable) -> Callable:
    """The forward; where weights of the module stream, each run of it is one by itself, as a capture has to be."""
    streamed = streamed_model(module)
    if streamed is None:
        return forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        streamed.start_run()
        result = forward(*args, **kwargs)
        streamed.end_run()
        return result

    return run


def elements(given: Any) -> int:
    """Of the tensors in the arguments of a call, but for masks, positions and caches, which grow from call to call."""
    if isinstance(given, torch.Tensor):
        return given.numel()
    if type(given) is dict:
        return sum(elements(one) for name, one in given.items() if not any(word in str(name) for word in BESIDE))
    return sum(map(elements, given)) if type(given) in (list, tuple) else 0
