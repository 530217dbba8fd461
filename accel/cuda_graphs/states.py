"""The states a module was in lately, each with graphs of its own: adapters and scales are switched back and forth."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from accel.cuda_graphs.fingerprint import Fingerprint

MOST = 4  # states; of more, those that were left the longest ago are forgotten


class Watched(Protocol):
    """What a forward reads beside its module."""

    def views(self) -> Iterable[Iterable]: ...


@dataclass
class State:
    """What a module was, and the number by which graphs that were captured from it are found."""

    number: int
    fingerprint: Fingerprint


class States:
    """States of one module: `now` is the last one that it was found in, None before it was looked at.

    Only states of the same modules over the same weights are kept beside `now`: others would keep alive what the user
    has taken out.
    """

    def __init__(self) -> None:
        self._known: list[State] = []  # the present one last
        self._count = 0

    @property
    def now(self) -> Fingerprint | None:
        return self._known[-1].fingerprint if self._known else None

    @property
    def number(self) -> int:
        """Of the present state."""
        return self._known[-1].number if self._known else 0

    def renew(self, take: Callable[[], Fingerprint]) -> tuple[Fingerprint, bool]:
        """What the module is now, and whether it was not that before. take: makes its fingerprint."""
        for state in reversed(self._known[:-1]):
            if state.fingerprint.reachable() and state.fingerprint.holds():
                self._known.remove(state)
                self._known.append(state)
                return state.fingerprint, False
        new = take()
        kept = [state for state in self._known if state.fingerprint.alike(new)][1 - MOST :]
        self._count += 1
        self._known = [*kept, State(self._count, new)]
        return new, True

    def follow(self, take: Callable[[], Fingerprint]) -> None:
        """Sees the present state anew where its weights alone have moved. For one without graphs."""
        if self.now is not None and not self.now.reachable() and self.now.holds():
            self._known = [State(self.number, take())]

    def clear(self) -> None:
        self._known = []

    def numbers(self) -> set[int]:
        """Of all states whose graphs are of use."""
        return {state.number for state in self._known}
