"""State that every thread has of its own."""

import threading
from typing import Any


class PerThread:
    """Keeps in `_local` what copies and pickles do not take along: a copy begins with nothing."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(type(self)()))
