"""What tests want to know of calls that go on as they are."""

from collections.abc import Callable
from typing import Any


def noted(monkeypatch, owner: Any, name: str, what: Callable, into: list | None = None) -> list:
    """`what` of the arguments of each call of owner.name from now on, one after the other."""
    found, run = [] if into is None else into, getattr(owner, name)

    def noting(first, *args, **kwargs):  # a name by itself: forwards are asked for what stands behind it
        found.append(what(first, *args, **kwargs))
        return run(first, *args, **kwargs)

    monkeypatch.setattr(owner, name, noting)
    return found
