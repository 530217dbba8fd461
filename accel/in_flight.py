"""Keeps a model from being changed while threads are in calls of it.

A change takes several steps: forwards are replaced one by one, weights move to other memory. A call in between would be
wrong, and torch may read a weight while it moves. So changes are made inside of `alone`: calls under way end first, new
calls wait at the modules' gate. Stock calls run no code of accel's, so they are found by the frames of threads. That
takes milliseconds, unless a call takes longer.

While a model is examined and tried, which takes seconds, calls of other threads run stock: `others_run_stock`.

Only Python's threads are seen; calls cost nothing while no model is being changed.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from accel.errors import InUse

PATIENCE = 60.0  # seconds that a change waits for calls under way
GATE = "_call_impl"  # of a module: what calling it looks up on the instance
CALL = nn.Module._call_impl.__code__
CHANGED = threading.Condition()  # notified when a gate opens, or knows which calls may pass


class Permit:
    """Tells the callables that accel put on one object whether they may run fused: see `Mark`."""

    gate: "CallGate | None" = None
    trial: "Trial | None" = None

    def refuses(self) -> bool:
        """Whether this call is to run stock. Waits while the object is changed, which may leave stock alone there."""
        trial, gate = self.trial, self.gate
        return (trial is not None and trial.thread != threading.get_ident()) or (gate is not None and gate.passed())


class CallGate:
    """Stands in `vars(module)["_call_impl"]` while a model is changed by `thread`; None afterwards, as in copies."""

    def __init__(self, thread: int | None = None) -> None:
        self.thread = thread
        self.inside: dict[int, FrameType] | None = None  # by thread, the outermost frame of a call under way

    def __reduce__(self) -> tuple:
        return CallGate, ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = sys._getframe(1).f_locals["self"]  # shallow copies of a module hold its gate too
        self.passed()
        return getattr(type(module), GATE)(module, *args, **kwargs)

    def passed(self) -> bool:
        """Whether the call had to wait. A call that is part of one under way goes on."""
        if self._open():
            return False
        with CHANGED:
            CHANGED.wait_for(lambda: self._open() or self.inside is not None)
            if self._open():
                return True
            inside = self.inside or {}
            if _reaches(sys._getframe(), inside.get(threading.get_ident())):
                return False
            CHANGED.wait_for(self._open)
        return True

    def _open(self) -> bool:
        return self.thread in (None, threading.get_ident())


class Here:
    """A hook that acts only on the thread that made it."""

    def __init__(self, hook: Callable) -> None:
        self.hook, self.thread = hook, threading.get_ident()

    def __call__(self, *given: Any) -> Any:
        return self.hook(*given) if threading.get_ident() == self.thread else None


@contextmanager
def listening(hooks: Iterable[tuple[nn.Module, Callable]], before: bool = False) -> Iterator[None]:
    """Inside, forward hooks of modules act on this thread. before: they come before a call, and are given keywords."""
    with ExitStack() as undo:
        for module, hook in hooks:
            mine = hook if isinstance(hook, Here) else Here(hook)
            register = module.register_forward_hook
            if before:
                register = partial(module.register_forward_pre_hook, with_kwargs=True)
            undo.callback(register(mine).remove)
        yield


class Trial:
    """The time in which patches on an object are used only by the thread that tries them."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.permits: list[Permit] = []

    def end(self) -> None:
        for permit in self.permits:
            permit.trial = None
        self.permits.clear()


TRIAL: ContextVar[Trial | None] = ContextVar("accel_trial", default=None)


@contextmanager
def others_run_stock() -> Iterator[Callable]:
    """Inside, calls of other threads run stock, whatever is patched here.

    Yields a function that ends this for given models, once such calls have ended: none goes on fused that began stock.
    """
    trial = Trial()

    def end(*models: nn.Module) -> None:
        with alone(*models):
            trial.end()

    token = TRIAL.set(trial)
    try:
        yield end
    finally:
        TRIAL.reset(token)
        trial.end()


def join_trial(permit: Permit) -> None:
    """Called for an object that gets callables of accel's during a trial."""
    trial = TRIAL.get()
    if trial is not None:
        permit.trial = trial
        trial.permits.append(permit)  # the second reference to it, by which callables know that they must ask


@contextmanager
def alone(*models: nn.Module, anyway: bool = False) -> Iterator[None]:
    """Inside, no other thread is in a call of these models, and new calls wait.

    Raises InUse where a call does not end in time, unless the change is to be made anyway.
    """
    with _closed(models) as gate:
        if gate is not None and gate.inside:
            until = time.monotonic() + PATIENCE
            pause = 1e-4
            while calls := _running(gate.inside):
                if time.monotonic() > until:
                    if anyway:
                        break
                    raise InUse(_told(calls, models))
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            _synchronize(models)
        yield
        if gate is not None:
            _synchronize(models)


@contextmanager
def alone_if_idle(*models: nn.Module) -> Iterator[bool]:
    """Whether no other thread is in a call of these models; then none begins inside. For changes that can wait."""
    with _closed(models) as gate:
        yield gate is None or not gate.inside
        if gate is not None:
            _synchronize(models)


@contextmanager
def _closed(models: tuple[nn.Module, ...]) -> Iterator[CallGate | None]:
    """Inside, other threads begin no call of these models; None where this process has no other thread."""
    if not _others():
        yield None
        return
    modules = {id(module): module for model in models for module in model.modules()}
    gate = CallGate(threading.get_ident())
    with CHANGED:
        CHANGED.wait_for(lambda: all(held is None or held._open() for held in map(call_gate, modules.values())))
        mine = [module for module in modules.values() if _free(module)]
        permits = [one for module in mine for one in vars(module).values() if isinstance(one, Permit)]
        for module in mine:
            if not isinstance(vars(module).get(GATE), Permit):
                vars(module)[GATE] = gate
        for permit in permits:
            permit.gate = gate
    try:
        inside = _inside(set(map(id, mine)))
        with CHANGED:
            gate.inside = inside
            CHANGED.notify_all()
        yield gate
    finally:
        with CHANGED:
            for module in mine:
                if vars(module).get(GATE) is gate:
                    del vars(module)[GATE]
            for permit in permits:
                permit.gate = None
            gate.thread = gate.inside = None
            CHANGED.notify_all()


def call_gate(module: nn.Module) -> CallGate | None:
    """The gate that stands on a module, beneath another permit too; None where there is none."""
    found = vars(module).get(GATE)
    return found.gate if isinstance(found, Permit) else found


def _free(module: nn.Module) -> bool:
    """Whether this thread has no gate there yet; one of nobody's is a copy's."""
    found = call_gate(module)
    return found is None or found.thread is None


def _others() -> dict[int, FrameType]:
    """The frames of the other threads."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    return frames


def _inside(owners: set[int]) -> dict[int, FrameType]:
    """By other threads, the outermost frame of a call of these objects."""
    found = {}
    for thread, top in _others().items():
        frame: FrameType | None = top
        while frame is not None:
            if id(_called(frame)) in owners:
                found[thread] = frame
            frame = frame.f_back
    return found


def called_in(module: nn.Module) -> bool:
    """Whether this is part of a call of a module, by the frames of this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code is CALL and frame.f_locals.get("self") is module):
        frame = frame.f_back
    return frame is not None


def _called(frame: FrameType) -> object:
    """The object whose call runs in this frame: a module, or the owner of a callable that accel put on it."""
    if frame.f_code is CALL:
        return frame.f_locals.get("self")
    if not frame.f_globals.get("__name__", "").startswith("accel."):
        return None
    one = frame.f_locals.get("self")
    # None too while it is being made.
    return getattr(one, "owner", None) if getattr(type(one), "computes", False) else None


def _reaches(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Whether a frame is part of the call in another one."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _running(calls: dict[int, FrameType]) -> dict[int, FrameType]:
    """Those that have not ended."""
    tops = _others()
    return {thread: frame for thread, frame in calls.items() if _reaches(tops.get(thread), frame)}


def _told(calls: dict[int, FrameType], models: tuple[nn.Module, ...]) -> str:
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    names = ", ".join(repr(threads.get(thread, str(thread))) for thread in calls)
    kinds = " or ".join(dict.fromkeys(type(model).__name__ for model in models))
    return (
        f"a call of {kinds} on thread {names} has not ended within {PATIENCE:g} seconds, and a model is not changed "
        "within a call: end it, or wait for it, then do this again"
    )


def _synchronize(models: tuple[nn.Module, ...]) -> None:
    """Waits for the devices, before memory moves, and after."""
    if not torch.cuda.is_initialized():
        return
    for device in {one.device for model in models for one in model.parameters() if one.is_cuda}:
        for stream in (torch.cuda.default_stream(device), torch.cuda.current_stream(device)):
            stream.synchronize()  # not the device, which is an error while another thread captures a graph
