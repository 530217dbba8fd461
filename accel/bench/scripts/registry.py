"""The scripts by name."""

from collections.abc import Iterator

from accel.bench.scripts import cards, encoders, generation, images, placement, quantized
from accel.bench.scripts.script import Script


def _scripts() -> Iterator[Script]:
    """Those of each module, by themselves and in tables."""
    for module in (images, placement, encoders, generation, quantized, cards):
        for found in vars(module).values():
            yield from (one for one in (found if type(found) is tuple else (found,)) if isinstance(one, Script))


SCRIPTS = {one.name: one for one in _scripts()}


def find_scripts(names: list[str]) -> list[Script]:
    """Scripts whose names are, or begin with, these; all without names. Raises KeyError with an unknown one."""
    if unknown := [name for name in names if not any(one.startswith(name) for one in SCRIPTS)]:
        raise KeyError(*unknown)
    exact = {name for name in names if name in SCRIPTS}
    begins = tuple(name for name in names if name not in SCRIPTS)
    return [one for name, one in SCRIPTS.items() if not names or name in exact or (begins and name.startswith(begins))]
