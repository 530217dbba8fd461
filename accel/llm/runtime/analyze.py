"""The formulas of all layers of a model: found in a run, and found again in one where all numbers are large."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from accel.libraries.cache import SOUGHT, cache_argument
from accel.libraries.versions import newer_than_tested
from accel.llm.attention.position_terms import QueryScale
from accel.llm.attention.softmax_attention import SoftmaxSpec
from accel.llm.pipeline.placement import layer_placement
from accel.llm.recording.inputs import few
from accel.llm.recording.mask_tables import hides_keys
from accel.llm.recording.record import LayerRecord, NotUnderstood, Record
from accel.llm.recording.recorder import record
from accel.llm.recording.recording_cache import keeps_more
from accel.llm.recording.resting import model_side_effects
from accel.llm.runtime.layer import understand_around, understand_layer
from accel.llm.runtime.layer_spec import LayerSpec
from accel.parallel.sharded_layers import ranks_of
from accel.patching.guard import plain_settings
from accel.patching.structure import meta_weights


@dataclass
class Analysis:
    """What the layers of one model compute. layers: by path the formula of each, or why it is not known. specs: of
    those that are known, with the records they were found in. reason: why all of the model is left stock, or None.
    """

    layers: dict[str, LayerSpec | str] = field(default_factory=dict)
    specs: list[tuple[LayerRecord, LayerSpec]] = field(default_factory=list)
    reason: str | None = "not analyzed"

    def outline(self) -> tuple:
        """Which layers are understood, and why all are not: without numbers, which other ranks have others of."""
        known = tuple(path for path, found in self.layers.items() if not isinstance(found, str))
        return known, self.reason is None

    def routers(self) -> frozenset[str]:
        """Paths of linears by which layers choose experts."""
        blocks = ((record.path, one) for record, spec in self.specs if spec.mlp is not None for one in spec.mlp.blocks)
        return frozenset(f"{path}.{one.route.product}" for path, one in blocks if one.route is not None)

    def unknown(self) -> str | None:
        """The first layer that is not understood, or of which no store keeps all, and why."""
        found = ((path, one if isinstance(one, str) else one.keeps_more) for path, one in self.layers.items())
        return next((f"{path}: {reason}" for path, reason in found if reason is not None), None)


def analyze(model: PreTrainedModel, scores: bool = False, whole: bool = False) -> Analysis:
    """Runs the model on a few tokens and leaves it as it was. whole: every layer must be understood, not just some."""
    found = Analysis()
    try:
        if (reason := _obstacle(model)) is not None:
            raise NotUnderstood(reason)
        try:
            around = not whole and ranks_of(model) is None  # each of which would try them alone
            found.specs = formulas(model, found.layers, scores, some=True, around=around)
        except NotUnderstood:
            if not any(not isinstance(one, str) and one.runs_stock for one in found.layers.values()):
                raise
            found.layers.clear()
            found.specs = formulas(model, found.layers, scores, some=True)
        found.reason = found.unknown() if whole else None
    except NotUnderstood as error:
        found.reason = str(error)
    return found


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why it is not run at all."""
    if (reason := model_side_effects(model)) is not None:
        return reason
    if cache_argument(type(model).forward) is None:
        return f"its forward takes no cache{f': {SOUGHT}' if newer_than_tested() else ''}"
    words = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(words, torch.Tensor) or words.dim() != 2:
        return "it has not one table of embeddings"
    if meta_weights(model):
        return "weights not loaded"
    placed = layer_placement(model)
    return placed if isinstance(placed, str) else None


def formulas(
    model: PreTrainedModel,
    layers: dict[str, LayerSpec | str],
    scores: bool = False,
    some: bool = False,
    around: bool = False,
) -> list[tuple[LayerRecord, LayerSpec]]:
    """Every layer's record and formula, all of them known; with `some`, of those that are, of which one at least stores
    keys and values. around: of others too what is around their attention, which runs stock. Raises NotUnderstood.

    layers: filled with the formula of every layer by its path, or why it is not known. scores: the records still hold
    queries and keys; nothing else of the run does.
    """

    known_around: dict[str, LayerSpec] = {}

    def run(known: Record | None = None) -> Record:
        found: dict[str, LayerSpec | str] = {}

        def look(layer: LayerRecord, seen: Record) -> None:
            found[layer.path] = one = _formula(layer, seen)
            if around and isinstance(one, str) and (spec := understand_around(layer, one)) is not None:
                known_around[layer.path] = spec

        seen = record(model, look, scores, own=known is not None, known=known)
        layers.update({layer.path: found.get(layer.path, "it did not run") for layer in seen.layers})
        return seen

    seen = run()
    if not seen.asked and any(isinstance(one, str) for one in layers.values()):
        seen = run(known=seen)
    layers.update({path: spec for path, spec in known_around.items() if isinstance(layers[path], str)})
    found: list[tuple[LayerRecord, LayerSpec]] = []
    unknown: list[str] = []
    for layer in seen.layers:
        spec = layers[layer.path]
        reason = spec if isinstance(spec, str) else spec.keeps_more
        if reason is not None:
            unknown.append(f"{layer.path}: {reason}")
        if not isinstance(spec, str):
            found.append((layer, spec))
    places = sorted(place for _, spec in found for place in spec.cached)
    stock = any(spec.runs_stock for _, spec in found)
    if unknown and not (some and (places or stock)):
        raise NotUnderstood(keeps_more(model) or unknown[0])
    if not places and not stock:
        raise NotUnderstood("no layer stores keys and values")
    windows = {spec.place: spec.window for _, spec in found}
    for layer, spec in found:
        place = spec.attention.index if spec.attention is not None and spec.borrows else None
        if place is not None and (unknown or spec.window != windows.get(place, -1)):
            raise NotUnderstood(
                unknown[0] if unknown else f"{layer.path}: it sees other keys of a layer than that layer itself"
            )
    keywords = {word for _, spec in found if spec.attention is not None for word in spec.attention.keywords}
    # What looks up positions in a table could be led outside of it, which on a GPU ends the process.
    free = seen.layers[0].most_positions is None
    if not free and any(layer.shown_length is not None for layer in seen.layers):
        raise NotUnderstood("its layers ask how much the cache holds")
    rotaries = [spec.attention.rotary for _, spec in found if isinstance(spec.attention, SoftmaxSpec)]
    tables = any(rotary is not None and rotary.table for rotary in rotaries)  # in which positions are looked up
    rotated = bool(keywords) and not tables and free
    _confirm_where_large(model, layers, seen, last=rotated and not unknown, far=free)
    found = [(layer, spec) for layer, _ in found if isinstance(spec := layers[layer.path], LayerSpec)]
    if len(set(places)) < len(places) or (not unknown and not _in_order(found, places)):
        raise NotUnderstood("layers that share a place in the cache")
    return found


def _in_order(found: list[tuple[LayerRecord, LayerSpec]], places: list[int]) -> bool:
    """Whether layers of attention have the first places in the cache, or each that of its number among all layers."""
    numbers = [number for number, (_, spec) in enumerate(found) if spec.place is not None]
    return places in (list(range(len(places))), numbers)


def _formula(layer: LayerRecord, seen: Record) -> LayerSpec | str:
    """The formula of a layer, or why it is not known."""
    known = None if layer.known is None else layer.known.runs_stock
    try:
        spec = understand_layer(layer, seen) if known is None else understand_around(layer, known)
        if spec is None:
            return "it computes something else around its attention"
        mixer, read = spec.attention, []
        if isinstance(mixer, SoftmaxSpec):
            read = [layer.attention]
        elif mixer is not None and spec.runs_stock:
            read = list(layer.layer.get_submodule(mixer.name).modules())
        others = [module for module in layer.layer.modules() if module not in read]
        if any(hides_keys(table) for module in others for table in module._buffers.values()):
            raise NotUnderstood("it holds a mask that is not causal")
        return spec
    except NotUnderstood as reason:
        return str(reason)


def _confirm_where_large(
    model: PreTrainedModel, layers: dict[str, LayerSpec | str], seen: Record, last: bool, far: bool
) -> None:
    """Finds the same formulas once more where all numbers are large; one layer of each make tells for the others.
    last: and at late positions, since some models scale queries from a position on; far: or by what the cache holds.
    Raises NotUnderstood where it finds another. layers: get what shows in that run alone; where it is a factor of
    queries, a run more shows from which position on it is the next.
    """
    makes: dict[tuple, LayerSpec] = {}
    others: list[str] = []

    def look(layer: LayerRecord, amplified: Record) -> None:
        spec = layers[layer.path]
        if isinstance(spec, str) or others or layer.call.made is None:
            return
        kind = None if spec.attention is None else spec.attention.kernel_key()
        make = (kind, *map(_make, layer.layer.modules()))
        through = (layer.call.input.held, layer.call.output.held)  # beyond these a norm gives zeros
        finite = all(bool(one.float().square().sum(-1).isfinite().all()) for one in through)
        if make not in makes and finite:
            layer.known = spec
            found = _formula(layer, amplified)
            if isinstance(found, str) or _completed(spec, found) != found:
                others.append(layer.path)
                return
            makes[make] = found
        if make in makes:
            layers[layer.path] = _completed(spec, makes[make])

    record(model, look, amplified=True, last=last, far=far, own=seen.own, known=seen)
    attentions = [spec.attention for spec in layers.values() if not isinstance(spec, str)]
    scales = {one.q_scale for one in attentions if isinstance(one, SoftmaxSpec)}
    for length in {scale.length for scale in scales if isinstance(scale, QueryScale)}:
        makes.clear()
        begin = max(0, int(length) - few(model) // 2 - 1)
        record(model, look, amplified=True, last=last, far=far, begin=begin, own=seen.own, known=seen)
    for path in others:
        layers[path] = "it computes something else where numbers are large"
        raise NotUnderstood(f"{path}: {layers[path]}")


def _completed(spec: LayerSpec, found: LayerSpec) -> LayerSpec:
    if spec.attention is None or found.attention is None:
        return spec
    return replace(spec, attention=spec.attention.completed(found.attention))


def _make(module: nn.Module) -> tuple:
    """What a module computes by, but for its number among the layers."""
    return tuple(one for one in plain_settings(module) if not isinstance(one, tuple) or type(one[1]) is not int)
