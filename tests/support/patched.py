"""What of a model is replaced, and what the report says of it."""

import accel
from accel.patching.fast_forward import FastForward


def fast_forwards(model):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), FastForward)]


def sites(model, rule: str) -> dict[str, tuple[str, str]]:
    """Status and reason of every path that this rule tells of."""
    return {path: (status, reason) for path, name, status, reason in accel.report(model).sites if name == rule}
