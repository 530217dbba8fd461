"""What of a model is replaced."""

from accel.patching.fast_forward import FastForward


def fast_forwards(model):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), FastForward)]
