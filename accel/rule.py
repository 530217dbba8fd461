"""What a rule answers when shown a site."""

from collections.abc import Callable
from dataclasses import dataclass, field

from accel.site import Site


@dataclass(frozen=True)
class Match:
    """Replace this site's forward, apply `patches` first.

    covers: names of the children whose work the new forward does itself, so that no other rule looks at them; None
    means all of them.
    """

    forward: object | None = None
    patches: tuple = ()
    covers: tuple[str, ...] | None = None
    note: str = ""


@dataclass(frozen=True)
class Skip:
    """My kind of site, but not to be touched; the reason goes into the report. Children are looked at in turn."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """`match(site, context)` gives Match, Skip, or None for "not my kind"."""

    name: str
    match: Callable[[Site, object], Match | Skip | None] = field(repr=False)
