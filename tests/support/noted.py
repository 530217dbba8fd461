"""What tests want to know of calls that go on as they are."""

import sys
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


def noted(monkeypatch, owner: Any, name: str, what: Callable, into: list | None = None) -> list:
    """`what` of the arguments of each call of owner.name from now on, one after the other."""
    found, run = [] if into is None else into, getattr(owner, name)

    def noting(first, *args, **kwargs):  # a name by itself: forwards are asked for what stands behind it
        found.append(what(first, *args, **kwargs))
        return run(first, *args, **kwargs)

    monkeypatch.setattr(owner, name, noting)
    return found


def call_counts(monkeypatch, methods: dict[Any, tuple[Any, str]]) -> Counter:
    """By its key, how often each method, (owner, name), is called from now on."""
    counts: Counter = Counter()

    def count(key: Any, *_: Any, **__: Any) -> None:
        counts[key] += 1

    for key, (owner, name) in methods.items():
        noted(monkeypatch, owner, name, partial(count, key))
    return counts


def fails_at(monkeypatch, number: int, owner: Any, name: str, error: type[BaseException], *told: str) -> list:
    """The call of owner.name of this number, from 1, raises such an error instead. Grows by one with each call."""
    calls: list[None] = []

    def count(*_: Any, **__: Any) -> None:
        calls.append(None)
        if len(calls) == number:
            raise error(*told)

    noted(monkeypatch, owner, name, count)
    return calls


def code_runs(codes: set[types.CodeType], action: Callable[[], object]) -> int:
    """How often any of these runs meanwhile, by whatever way it is called."""
    count = 0

    def watch(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code in codes

    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


class OperationCount(TorchDispatchMode):
    """count: of operations inside of which `counts` holds."""

    def __init__(self, counts: Callable[[Any], bool]):
        super().__init__()
        self.counts, self.count = counts, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.counts(function)
        return function(*args, **(kwargs or {}))
