"""What happened while the optimized object ran: calls that fell back to stock, and why."""

import threading
from collections import Counter
from typing import Any

import torch


class FallbackLog:
    """Counts fallbacks by (path, reason); safe under threads, empty in copies and pickles.

    stock_on_cpu: calls on a CPU run stock by choice, see `accel.planning.whole_models`, and are not counted.
    """

    def __init__(self, stock_on_cpu: bool = False):
        self.stock_on_cpu = stock_on_cpu
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"stock_on_cpu": self.stock_on_cpu}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FallbackLog.__init__(self, **state)

    def runs_stock_on_cpu(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call with these arguments is one on a CPU that runs stock by choice. Asked by every forward."""
        if self.stock_on_cpu:
            for values in (args, kwargs.values()):
                for value in values:
                    if isinstance(value, torch.Tensor):
                        return value.is_cpu
        return False

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()

    def fell_back(self, path: str, reason: str) -> None:
        with self._lock:
            self._counts[path, reason] += 1

    def rows(self) -> list[tuple[str, str, int]]:
        """(path, reason, calls), most frequent first."""
        with self._lock:
            return [(path, reason, count) for (path, reason), count in self._counts.most_common()]
