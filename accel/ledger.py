"""What happened while the optimised object ran: calls that fell back to stock, and why."""

import threading
from collections import Counter


class Ledger:
    """Counts fallbacks by (path, reason); safe under threads, empty in copies and pickles."""

    def __init__(self):
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()

    def fell_back(self, path: str, reason: str) -> None:
        with self._lock:
            self._counts[path, reason] += 1

    def rows(self) -> list[tuple[str, str, int]]:
        """(path, reason, calls), most frequent first."""
        with self._lock:
            return [(path, reason, count) for (path, reason), count in self._counts.most_common()]
