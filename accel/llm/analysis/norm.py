"""One norm of a layer: where it is, what it computes, and what it was when that was found."""

from dataclasses import dataclass

from accel.fusion.norm_kind import NormKind, norm_kind
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.guard import plain_settings


@dataclass(frozen=True)
class NormSpec:
    """name: from the layer. kind: the formula, None for a norm that must be called. settings: see `settings`."""

    name: str
    kind: NormKind | None
    settings: tuple


def norm_spec(layer: LayerRecord, call: Call) -> NormSpec:
    """The norm that a recorded call was of."""
    found, width = plain_settings(call.module), call.input.held.shape[-1]
    shapes = tuple(p.shape for p in call.module.parameters())
    key = (found, width, shapes)
    if key not in layer.kinds:
        layer.kinds[key] = norm_kind(call.module, width)
    return NormSpec(layer.name(call.module), layer.kinds[key], found)
