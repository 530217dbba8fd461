"""Where a thread is: in which forward of a model, and in which run of a pipeline's denoising loop."""

import itertools
import threading
from collections.abc import Iterable
from weakref import ref

from accel.patching.owner import PartlyCopied


class PerThread(PartlyCopied):
    """Keeps in `_local` what copies and pickles do not take along: a copy begins with nothing."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._local = threading.local()


class ForwardCounter(PerThread):
    """`number` counts the forwards that this thread has begun; `tracked` says whether anybody counts them. `apart`:
    weights come in parts in this one, so that none may be read before its module is called.
    """

    copied, tracked = ("tracked",), False

    @property
    def number(self) -> int:
        return getattr(self._local, "number", 0)

    @property
    def apart(self) -> bool:
        return getattr(self._local, "apart", False)

    def begin(self, apart: bool = False) -> None:
        self._local.number, self._local.apart = self.number + 1, apart


class DenoisingLoop(PerThread):
    """`number` is that of the loop that this thread began last; 0 where it began none. No two loops have the same
    number.

    It is 0 where only a model was optimized, or the loop is another pipeline's. What is kept for one loop, such as
    features, is compared with this number.
    """

    def renew(self) -> None:
        super().renew()
        self._numbers = itertools.count(1)

    @property
    def number(self) -> int:
        return getattr(self._local, "number", 0)

    @property
    def clock(self) -> tuple[int, ...] | None:
        """How many steps the loop's schedulers have made, which grows through it; None where none counts them."""
        counts = [
            getattr(scheduler(), "step_index", "uncounted") for scheduler in getattr(self._local, "schedulers", ())
        ]
        known = tuple(-1 if count is None else count for count in counts if count is None or isinstance(count, int))
        return known or None

    def begin(self, schedulers: Iterable[object] = ()) -> None:
        self._local.number = next(self._numbers)
        self._local.schedulers = tuple(map(ref, schedulers))
