"""Objects of which copies and pickles keep a part, and make the rest anew."""

from typing import Any


class PartlyCopied:
    """A copy keeps the attributes named in `copied`; `renew` sets all others, in a new object too."""

    copied: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.renew()

    def renew(self) -> None:
        """Sets what copies do not keep."""
