"""What tells a model whose weights stream of its calls, and of its blocks'."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any

import torch
from accel_kernels import OPS
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel.errors import Refused
from accel.in_flight import GATE, Permit, call_gate
from accel.offload.merging import tell_of_merging
from accel.patching.owner import PartlyCopied
from accel.patching.structure import CallersHook

BESIDE = ("mask", "position", "past", "cache")  # arguments that say nothing about how much is computed


class BlockHook(CallersHook):
    """Stands on a block, before its call or behind it. The block is called, so what it does is part of the call."""

    def __init__(self, model: Any, path: str, behind: bool):
        self.model, self.path, self.behind = model, path, behind

    def __call__(self, module: nn.Module, *given: Any) -> None:
        self.model.reads.inside = "" if self.behind else self.path
        self.model.leave_block(self.path) if self.behind else self.model.take_block(self.path)


class StreamedCall(PartlyCopied, Permit):
    """Stands in `vars(module)["_call_impl"]` of a model, and of its parts around blocks, which others call by
    themselves: a call that is interrupted ends too, which torch tells no hook. torch.compile leaves it as it is.
    """

    computes = True  # see `in_flight.py`
    copied = ("streamed", "path", "owner", "gate")

    def __init__(self, streamed: Any, path: str = ""):
        self.streamed, self.path, self.owner = streamed, path, streamed.model.get_submodule(path)
        self.renew()

    def renew(self) -> None:
        self.uncompiled = torch.compiler.disable(type(self).run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.uncompiled(self, self.owner, args, kwargs)
        return self.run(sys._getframe(1).f_locals.get("self", self.owner), args, kwargs)

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """module: that is called; shallow copies hold this too."""
        stock = getattr(type(module), GATE)
        if self.streamed.caller == threading.get_ident():
            return stock(module, *args, **kwargs)
        with self.begun(elements((args, kwargs))):
            return stock(module, *args, **kwargs)

    @contextmanager
    def begun(self, size: int | None) -> Iterator[None]:
        self.refuses()  # waits while the model is changed
        held = self.streamed
        with held.one_call(self.path, size), _noting_reads(held), _refusing_gradients(held):
            yield


def hook_model(streamed: Any) -> None:
    """The model tells of its calls, also while no other thread may call it.

    What streams it, or a part, for another pipeline lets go; weights that lie side by side already stay so.
    """
    for module in streamed.model.modules():
        if (other := streamed_model(module)) is not None:
            other.let_go()
            if other.model is streamed.model and other.budget.host == streamed.budget.host:
                streamed.pieces, streamed.order, streamed.stacks = other.pieces, other.order, other.stacks
                streamed.tables = other.tables
    _put_on(streamed, "")


def _put_on(streamed: Any, path: str) -> None:
    call = StreamedCall(streamed, path)
    call.gate = call_gate(call.owner)
    vars(call.owner)[GATE] = call


def _take_off(module: nn.Module) -> None:
    gate = vars(module).pop(GATE).gate
    if gate is not None and gate.thread is not None:
        vars(module)[GATE] = gate


def unhook(streamed: Any) -> None:
    """Nothing of ours is left on the model."""
    hook_blocks(streamed, ())
    if streamed_model(streamed.model) is streamed:
        _take_off(streamed.model)


def _noting_reads(streamed: Any) -> AbstractContextManager:
    """Of a call that is the first of its size, or may be, as weights come within it."""
    return streamed.reads if streamed.unknown or streamed.arena is None else nullcontext()


def _refusing_gradients(streamed: Any) -> AbstractContextManager:
    """What autograd keeps of weights in the ring is something else by the time it reads it."""
    if not torch.is_grad_enabled():
        return nullcontext()
    return saved_tensors_hooks(lambda one: (one.detach(), streamed.ring is not None), _read_again)


def _read_again(kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
    if kept[1]:
        told = "accel.restore the model, or the pipeline that brings it, to train it"
        raise Refused(f"memory=: weights that stream are not kept for gradients: {told}")
    return kept[0]


def hook_blocks(streamed: Any, paths: Collection[str], called: bool = True) -> None:
    """Blocks at these paths, and no others, tell of theirs; not called: only of calls of themselves, or of a part.

    What does already stays: graphs are of a model with these very hooks, which comes for another turn.
    """
    tell_of_merging(streamed, bool(paths))
    at = streamed.model.get_submodule
    around = {path[:end] for path in paths for end, one in enumerate(f"{path}.") if one == "."}
    parts, blocks = ([(at(path), path) for path in some] for some in (around, paths if called else ()))
    for module in streamed.model.modules():
        if module is not streamed.model and streamed_model(module) is streamed:
            if (module, vars(module)[GATE].path) not in parts:
                _take_off(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in _own_hooks(streamed, hooks):
                if (module, hook.path) not in blocks:
                    del hooks[key]
    for part, path in parts:
        if streamed_model(part) is not streamed:
            _put_on(streamed, path)
    for block, path in blocks:
        if path not in (hook.path for _, hook in _own_hooks(streamed, block._forward_pre_hooks)):
            block.register_forward_pre_hook(BlockHook(streamed, path, False))
        if path not in (hook.path for _, hook in _own_hooks(streamed, block._forward_hooks)):
            block.register_forward_hook(BlockHook(streamed, path, True))


def _own_hooks(streamed: Any, hooks: Mapping[int, Any]) -> list[tuple[int, BlockHook]]:
    return [(key, one) for key, one in hooks.items() if isinstance(one, BlockHook) and one.model is streamed]


def streamed_model(module: nn.Module) -> Any:
    """That of a model whose weights come as they are called, or of a part of it around such."""
    found = vars(module).get(GATE)
    return found.streamed if type(found) is StreamedCall else None


def one_call(module: nn.Module, size: int | None) -> AbstractContextManager:
    """Inside, forwards of the module, and of its parts, are a call of it: weights that stream come. size: elements of
    what is computed; None where weights are only looked at, in the places where calls find them.
    """
    found = vars(module).get(GATE)
    return found.begun(size) if type(found) is StreamedCall else nullcontext()


@contextmanager
def whole_runs(module: nn.Module, forward: Callable) -> Iterator[Callable]:
    """Gives the forward; where weights of the module stream, each run of it is one by itself, as a capture has to be.

    So are all inside together: a graph, which the host knows nothing of, leaves other blocks in the buffers. What a
    capture that is given up was to copy was never copied.
    """
    streamed = streamed_model(module)
    if streamed is None:
        yield forward
        return

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = forward(*args, **kwargs)
        except BaseException:
            with suppress(RuntimeError):  # a capture that has failed takes no more
                streamed.end_run()
            raise
        streamed.end_run()
        return result

    streamed.end_run()
    yield run
    streamed.end_run()


def calls_checked() -> int:
    """How many kinds of calls were compared with their references, which takes memory of its own; see `self_check`."""
    return sum(len(op.outcomes.outcomes) for op in OPS)


def elements(given: Any) -> int:
    """Of the tensors in the arguments of a call, but for masks, positions and caches, which grow from call to call."""
    if isinstance(given, torch.Tensor):
        return given.numel()
    if type(given) is dict:
        return sum(elements(one) for name, one in given.items() if not any(word in str(name) for word in BESIDE))
    return sum(map(elements, given)) if type(given) in (list, tuple) else 0
