"""All plain values a module computes by: what was found out about it holds for as long as they stay."""

from torch import nn

from accel.patching.structure import tampered, trains


def settings(module: nn.Module) -> tuple:
    """The module's type and its numbers, strings and switches, by name; not whether it is in training mode."""
    named = ((name, value) for name, value in vars(module).items() if name != "training" and plain_value(value))
    return type(module), *sorted(named)


def as_understood(module: nn.Module, known: tuple) -> bool:
    """Whether a module may be computed from its weights still: these were its settings, and nothing hangs on it."""
    return settings(module) == known and tampered(module) is None and not trains(module)


def plain_value(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
