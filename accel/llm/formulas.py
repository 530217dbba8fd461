"""The formulas of all layers of a model: found in a run, and found again in one where all numbers are large."""

from torch import nn

from accel.llm.layer_spec import LayerSpec, understand_layer
from accel.llm.record import LayerRecord, Record
from accel.llm.recorder import record
from accel.llm.understanding import NotUnderstood
from accel.settings import settings


def formulas(model: nn.Module, layers: dict, scores: bool = False) -> list[tuple[LayerRecord, LayerSpec]]:
    """Every layer's record and formula, all of them known. Raises NotUnderstood.

    layers: filled with the formula of every layer by its path, or why it is not known. scores: the records still hold
    queries and keys; nothing else of the run does.
    """

    def run(known: Record | None = None) -> Record:
        found: dict = {}

        def look(layer: LayerRecord, seen: Record) -> None:
            found[layer.path] = _formula(layer, seen)

        seen = record(model, look, scores, own=known is not None, known=known)
        layers.update({layer.path: found.get(layer.path, "it did not run") for layer in seen.layers})
        return seen

    seen = run()
    if any(isinstance(found, str) for found in layers.values()) and not seen.asked:
        seen = run(known=seen)
    found = [(layer, layers[layer.path]) for layer in seen.layers]
    unknown = [(path, reason) for path, reason in layers.items() if isinstance(reason, str)]
    if unknown:
        raise NotUnderstood(f"{unknown[0][0]}: {unknown[0][1]}")
    _listen(model, layers, seen)
    if sorted(spec.attention.index for _, spec in found) != list(range(len(found))):
        raise NotUnderstood("layers that share a place in the cache")
    return found


def _formula(layer: LayerRecord, seen: Record) -> LayerSpec | str:
    """The formula of a layer, or why it is not known."""
    try:
        return understand_layer(layer, seen)
    except NotUnderstood as reason:
        return str(reason)


def _listen(model: nn.Module, layers: dict, seen: Record) -> None:
    """Finds the same formulas once more where all numbers are large; one layer of each kind tells for the others."""
    kinds, others = set(), []

    def look(layer: LayerRecord, loud: Record) -> None:
        kind = tuple(map(_kind, layer.layer.modules()))
        if kind in kinds or others or layer.call.output is None or not bool(layer.call.output.held.isfinite().all()):
            return
        kinds.add(kind)
        layer.known = layers[layer.path]
        if _formula(layer, loud) != layer.known:
            others.append(layer.path)

    record(model, look, loud=True, own=seen.own, known=seen)
    for path in others:
        layers[path] = "it computes something else where numbers are large"
        raise NotUnderstood(f"{path}: {layers[path]}")


def _kind(module: nn.Module) -> tuple:
    """What a module computes by, but for its number among the layers."""
    return tuple(one for one in settings(module) if not isinstance(one, tuple) or type(one[1]) is not int)
