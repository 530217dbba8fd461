"""What a rule answers when shown a site."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accel.errors import reason_of
from accel.patching.context import Context
from accel.patching.site import Site


@dataclass(frozen=True)
class Match:
    """Apply `patches`, then replace this site's forward.

    covers: names of the children whose work the new forward does, so that no other rule sees them; None for all.
    inside: path and rule of those that `patches` give a forward, for the report.
    """

    forward: Any | None = None
    patches: tuple = ()
    covers: tuple[str, ...] | None = None
    note: str = ""
    inside: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Skip:
    """Leave the site stock; the reason goes into the report. Rules are asked about its children in turn."""

    reason: str


@dataclass(frozen=True)
class Rule:
    """`match(site, context)` gives Match, Skip, or None for "not my kind"."""

    name: str
    match: Callable[[Site, Context], Match | Skip | None] = field(repr=False)

    def answer(self, site: Site, context: Context) -> Match | Skip | None:
        """What `match` gives. Its errors are reasons to skip: one unknown block must not break a pipeline."""
        reason = None
        try:
            answer = self.match(site, context)
            if isinstance(answer, Match) and answer.forward is not None:
                reason = answer.forward.remember()
        except Exception as error:
            return Skip(f"could not be examined: {reason_of(error)}")
        return answer if reason is None else Skip(reason)


def first_of(rules: Sequence[Rule], site: Site, context: Context) -> Match | Skip:
    """The match of the first rule that replaces the site's forward, for a forward that goes around it; its note names
    the rule.
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
