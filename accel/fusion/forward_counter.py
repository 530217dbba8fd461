"""Which forward of a model this is, for what may be kept within one and not beyond."""

import threading
from typing import Any


class ForwardCounter:
    """`number` counts the forwards that this thread has begun; `tracked` says whether anybody counts them."""

    def __init__(self) -> None:
        self.tracked = False
        self._local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"tracked": self.tracked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ForwardCounter.__init__(self)
        self.tracked = state["tracked"]

    @property
    def number(self) -> int:
        return getattr(self._local, "number", 0)

    def begin(self) -> None:
        self._local.number = self.number + 1
