"""What tells a model whose weights stream of its calls, and of its blocks'."""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel.errors import Refused
from accel.in_flight import GATE, Permit, call_gate
from accel.patching.structure import CallersHook

BESIDE = ("mask", "position", "past", "cache")  # arguments that say nothing about how much is computed


class BlockHook(CallersHook):
    """Stands on a block, before its call or behind it. The block is called, so what it does is part of the call."""

    def __init__(self, model: Any, path: str, behind: bool):
        self.model, self.path, self.behind = model, path, behind

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self.model.leave_block(self.path) if self.behind else self.model.take_block(self.path)


class StreamedCall(Permit):
    """Stands in `vars(model)["_call_impl"]`: a call that is interrupted ends too, which torch tells no hook."""

    computes = True  # see `in_flight.py`

    def __init__(self, streamed: Any):
        self.streamed = streamed

    @property
    def owner(self) -> nn.Module:
        return self.streamed.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = sys._getframe(1).f_locals["self"]  # shallow copies hold this too
        self.refuses()  # waits while the model is changed
        self.streamed.begin_call((args, kwargs))
        try:
            with _refusing_gradients(self.streamed):
                return getattr(type(module), GATE)(module, *args, **kwargs)
        finally:
            self.streamed.end_call()


def hook_model(streamed: Any) -> None:
    """The model tells of its calls, also while no other thread may call it. Graphs captured before are not replayed."""
    other, call = streamed_model(streamed.model), StreamedCall(streamed)
    if other is not None and other is not streamed:  # of another pipeline that it belongs to
        other.let_go()
    call.gate = call_gate(streamed.model)
    vars(streamed.model)[GATE] = call


def unhook(streamed: Any) -> None:
    """Nothing of ours is left on the model."""
    hook_blocks(streamed, ())
    if streamed_model(streamed.model) is streamed:
        gate = vars(streamed.model).pop(GATE).gate
        if gate is not None and gate.thread is not None:
            vars(streamed.model)[GATE] = gate


def _refusing_gradients(streamed: Any) -> AbstractContextManager:
    """What autograd keeps of weights in the ring is something else by the time it reads it."""
    if not torch.is_grad_enabled():
        return nullcontext()
    return saved_tensors_hooks(lambda one: (one.detach(), streamed.ring is not None), _read_again)


def _read_again(kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
    if kept[1]:
        raise Refused("memory=: weights that stream are not kept for gradients: accel.restore the model to train it")
    return kept[0]


def hook_blocks(streamed: Any, paths: Iterable[str]) -> None:
    """Blocks at these paths, and no others, tell of theirs."""
    for module in streamed.model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, one in hooks.items() if isinstance(one, BlockHook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    for path in paths:
        block = streamed.model.get_submodule(path)
        block.register_forward_pre_hook(BlockHook(streamed, path, False))
        block.register_forward_hook(BlockHook(streamed, path, True), always_call=True)


def streamed_model(module: nn.Module) -> Any:
    """That of a model whose weights come as they are called."""
    found = vars(module).get(GATE)
    return found.streamed if type(found) is StreamedCall else None


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
