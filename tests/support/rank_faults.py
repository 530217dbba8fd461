"""Processes of which one may die, with a group of their own that waits for a few seconds only."""

import queue
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from support.ranks import RankPool

LIMIT = timedelta(seconds=12)
HANGS = 150.0  # seconds; the machine may be busy


class FaultyRanks(RankPool):
    """A pool for one task, after which it is closed."""

    def __init__(self, size: int = 2):
        super().__init__(size, limit=LIMIT)

    def outcomes(self, function: Callable, *args: Any) -> list[Any]:
        """What function(*args) gave on each rank; the exit code of one that has ended without an answer."""
        for tasks in self.tasks:
            tasks.put((1, function, args))
        found: dict[int, Any] = {}
        end = time.monotonic() + HANGS
        while len(found) < self.size:
            assert time.monotonic() < end, f"only {found} after {HANGS} s"
            try:
                _, rank, value, error = self.answers.get(timeout=0.2)
                found[rank] = value if error is None else error
            except queue.Empty:
                for rank, process in enumerate(self.processes):
                    if not process.is_alive() and rank not in found:
                        found[rank] = process.exitcode
        return [found[rank] for rank in range(self.size)]

    def exit_codes(self) -> list[int | None]:
        """How each has ended by itself, once told to; None where it had to be killed."""
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(timeout=HANGS)
        codes = [process.exitcode for process in self.processes]
        self.close()
        return codes
