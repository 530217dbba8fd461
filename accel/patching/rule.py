"""What a rule answers when shown a site."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.errors import reason_of
from accel.patching.context import Context
from accel.patching.site import Site


@dataclass(frozen=True)
class Match:
    """Replace this site's forward, apply `patches` first.

    covers: names of the children whose work the new forward does itself, so that no other rule looks at them; None
    means all of them. inside: of those that get a forward of their own by `patches`, the path and the rule, for the
    report.
    """

    forward: Any | None = None
    patches: tuple = ()
    covers: tuple[str, ...] | None = None
    note: str = ""
    inside: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Skip:
    """My kind of site, but not to be touched; the reason goes into the report. Children are looked at in turn."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """`match(site, context)` gives Match, Skip, or None for "not my kind"."""

    name: str
    match: Callable[[Site, Context], Match | Skip | None] = field(repr=False)

    def answer(self, site: Site, context: Context) -> Match | Skip | None:
        """What `match` gives. An error of it is a reason to skip: one block of an unknown make spoils no pipeline."""
        reason = None
        try:
            answer = self.match(site, context)
            if isinstance(answer, Match) and answer.forward is not None:
                reason = answer.forward.remember()
        except Exception as error:
            return Skip(f"could not be examined: {reason_of(error)}")
        return answer if reason is None else Skip(reason)


def first_of(rules: Sequence[Rule], site: Site, context: Context) -> Match | Skip:
    """What the first of these rules that replaces the site's forward would do, for a forward that goes around it; its
    note says which rule that is.
    """
    told, patches = [], ()
    for rule in rules:
        answer = rule.answer(site, context)
        if isinstance(answer, Skip):
            if context.options.strict:
                return Skip(f"{rule.name}: {answer.reason}")
            told.append(f"{rule.name} skipped: {answer.reason}")
        elif isinstance(answer, Match):
            patches += answer.patches
            told.append(f"with {rule.name}" + (f" ({answer.note})" if answer.note else ""))
            if answer.forward is not None:
                return replace(answer, patches=patches, note="; ".join(told))
    return Match(None, patches, covers=(), note="; ".join(told))
