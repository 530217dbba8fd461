"""Which run of a pipeline's denoising loop this is."""

import itertools

from accel.patching.per_thread import PerThread


class Loop(PerThread):
    """`number` is that of the loop this thread began last, 0 where it began none: only a model was given to `optimize`,
    or it is another pipeline's loop. No two loops have the same number.

    What lives for one loop, such as features kept from step to step, compares it with the number it saw last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def number(self) -> int:
        return getattr(self._local, "number", 0)

    def begin(self) -> None:
        self._local.number = next(self._numbers)

    def forget(self) -> None:
        """As if this thread had begun none."""
        self._local.number = 0
