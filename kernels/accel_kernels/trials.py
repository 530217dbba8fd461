"""Measuring that is put off: choosers ask for it in a call, and the caller does it in parts after the call."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

MOST = 4096  # trials that wait; the oldest is forgotten, and asked for again when its shape comes again

_TURN = threading.Lock()  # to measure: two threads would measure each other


class Trials:
    """Trials that wait, by key: iterators of which each `next` measures a part, and which have decided at their end."""

    def __init__(self):
        self.waiting: dict[Hashable, Iterator[None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def noting(self) -> Iterator[dict[Hashable, None]]:
        """Inside, what this context asks for waits here; its keys are in the dictionary that is given, in order."""
        asked: dict[Hashable, None] = {}
        token = _NOTING.set(_Noting(self, asked))
        try:
            yield asked
        finally:
            _NOTING.reset(token)

    def work(self, keys: Iterable[Hashable], seconds: float = float("inf")) -> list[Hashable]:
        """Measures for these keys, in order, until so many seconds have passed; returns those that still wait.

        A part that has begun is finished. Nothing is measured while another thread measures.
        """
        keys = self.open(keys)
        if keys and _TURN.acquire(blocking=False):
            try:
                end = time.perf_counter() + seconds
                while keys and time.perf_counter() < end:
                    trial = self.waiting.get(keys[0], iter(()))
                    if next(trial, self) is self:  # at its end
                        self.waiting.pop(keys.pop(0), None)
            finally:
                _TURN.release()
        return keys

    def open(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Those of the keys that wait."""
        return [key for key in keys if key in self.waiting]

    def _add(self, key: Hashable, trial: Callable[[], Iterator[None]]) -> None:
        with self._lock:
            if key not in self.waiting:
                while len(self.waiting) >= MOST:
                    del self.waiting[next(iter(self.waiting))]
                self.waiting[key] = trial()


class _Noting(NamedTuple):
    trials: Trials
    asked: dict[Hashable, None]


# What collects the trials of this context, or None.
_NOTING: ContextVar[_Noting | None] = ContextVar("accel_kernels_noting", default=None)


def collecting() -> bool:
    """Whether trials are collected in this context, so that no call waits for measuring."""
    return _NOTING.get() is not None


def put_off(key: Hashable, trial: Callable[[], Iterator[None]]) -> bool:
    """Whether trials are collected in this context. If so, adds this one, unless one of its key waits already."""
    now = _NOTING.get()
    if now is None:
        return False
    now.trials._add(key, trial)
    now.asked[key] = None
    return True
