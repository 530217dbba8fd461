"""Docstrings here say `name: what it is` in running text. On the site each of these becomes an item of a list."""

import re
from itertools import pairwise

from griffe import Extension

FIELD = re.compile(r"^((?:\w+, )*\w+): (?=\S)")
SENTENCE = re.compile(r"(?<=[.;]) (?=((?:\w+, )*\w+): \S)")


class Fields(Extension):
    def on_object(self, *, obj, **_):
        if obj.is_alias or obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        known = {one.name for one in obj.parameters} if obj.is_function else set(obj.members)
        lines = []
        for line in obj.docstring.value.split("\n"):
            parts = split(line, known)
            lines += parts
        obj.docstring.value = listed(lines, known)


def names(line: str) -> list[str]:
    found = FIELD.match(line)
    return found[1].split(", ") if found else []


def is_field(line: str, known: set[str]) -> bool:
    given = names(line)
    return bool(given) and all(name in known for name in given)


def split(line: str, known: set[str]) -> list[str]:
    """A line cut where another field begins in it."""
    if line.startswith(" "):
        return [line]
    cuts = [found.start() for found in SENTENCE.finditer(line) if all(n in known for n in found[1].split(", "))]
    edges = [0, *(cut + 1 for cut in cuts), len(line)]
    return [line[a:b].rstrip() for a, b in pairwise(edges)]


def listed(lines: list[str], known: set[str]) -> str:
    """Fields as items; what follows one, up to an empty line or the next field, belongs to it."""
    done, inside = [], False
    for line in lines:
        if is_field(line, known):
            name, _, rest = line.partition(": ")
            done += ([] if inside else [""]) + [f"- **{name}**: {rest}"]
            inside = True
        elif inside and line and not line.startswith(("Raises ", "Returns ", "Gives ")):
            done.append("    " + line.strip())
        else:
            done += ["", line] if inside and line else [line]
            inside = False
    return "\n".join(done)
