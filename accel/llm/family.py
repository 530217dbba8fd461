"""What makes a model a causal language model, and the rules for it."""

import inspect

from torch import nn

from accel.graphs import GraphRunner
from accel.llm.check import find_manner
from accel.llm.decoder import DecoderForward
from accel.llm.head import HEAD, match_head
from accel.llm.layer import LayerForward
from accel.llm.layer_spec import LayerSpec, understand_layer
from accel.llm.recorder import LayerRecord, Record, decoder_layers, record, side_effects
from accel.llm.request import NAME, PrepareCache
from accel.llm.step import Steps
from accel.llm.understanding import NotUnderstood
from accel.patch import Patch, Stacked
from accel.rule import Match, Rule, Skip
from accel.rules.graph import obstacle
from accel.rules.norms import match_layer_norm, match_rms_norm
from accel.structure import meta_weights


def is_causal_lm(model: nn.Module) -> bool:
    """Whether a model continues text as transformers does: embeddings in, a head out, decoder only."""
    generates = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    if generates is None or not generates() or config is None or getattr(config, "is_encoder_decoder", False):
        return False
    heads = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    return all(get is not None and get() is not None for get in heads)


def match_decoder(site, context) -> Match | Skip | None:
    """The model itself, where every one of its layers is understood and the whole agrees with stock."""
    if site.path:
        return None
    context.shared[HEAD] = site.module.get_output_embeddings()
    layers = context.share("decoder layers", dict)
    try:
        forward, patches = _understand(site.module, context, layers)
    except NotUnderstood as reason:
        for path, found in layers.items():
            if not isinstance(found, str):
                layers[path] = "understood, but not the whole model"
        return Skip(str(reason))
    layers.update({layer.path: layer for layer in forward.layers})
    return Match(forward, patches=patches, covers=())


def _understand(model: nn.Module, context, layers: dict) -> tuple[DecoderForward, tuple]:
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        raise NotUnderstood("its forward takes no cache")
    reason = side_effects(model) or ("weights not loaded" if meta_weights(model) else None)
    if reason is not None:
        raise NotUnderstood(reason)
    if len({p.device for p in model.parameters()}) > 1:
        raise NotUnderstood("weights on several devices")
    stack, _ = decoder_layers(model)
    specs = _specs(model, layers)
    steps = Steps()
    parts = (context.kernels, context.ledger)
    forwards = [LayerForward(layer.layer, layer.path, *parts, spec, steps) for layer, spec in specs]
    forward = DecoderForward(model, "", *parts, stack, forwards, steps)
    forward.manner = find_manner(forward)
    if context.options.graphs is not False:
        keep = context.options.graphs is True
        forward.runner = GraphRunner(model, "", context.pool, context.ledger, obstacle, keep)
    stacks = (layer.stacks() for layer in forwards)
    patches = tuple(Stacked(linears) for linears in stacks if linears)
    return forward, (*patches, Patch(model, NAME, PrepareCache(model, forward)))


def _specs(model: nn.Module, layers: dict) -> list[tuple[LayerRecord, LayerSpec]]:
    """Every layer's record and formula. Raises NotUnderstood; `layers` then holds what is the matter with which."""
    seen = record(model)
    layers.update({layer.path: _formula(layer, seen) for layer in seen.layers})
    if any(isinstance(found, str) for found in layers.values()) and not seen.asks():
        seen = record(model, own=True)
        layers.update({layer.path: _formula(layer, seen) for layer in seen.layers})
    found = [(layer, layers[layer.path]) for layer in seen.layers]
    unknown = [(path, reason) for path, reason in layers.items() if isinstance(reason, str)]
    if unknown:
        raise NotUnderstood(f"{unknown[0][0]}: {unknown[0][1]}")
    _listen(model, found, layers, seen.own)
    if sorted(spec.attention.index for _, spec in found) != list(range(len(found))):
        raise NotUnderstood("layers that share a place in the cache")
    return found


def _formula(layer: LayerRecord, seen: Record) -> LayerSpec | str:
    """The formula of a layer, or why it is not known."""
    try:
        return understand_layer(layer, seen)
    except NotUnderstood as reason:
        return str(reason)


def _listen(model: nn.Module, found: list[tuple[LayerRecord, LayerSpec]], layers: dict, own: bool) -> None:
    """Finds the same formulas once more where all numbers are large; one layer of each kind tells for the others."""
    loud, kinds = record(model, loud=True, own=own), set()
    for layer, (_, spec) in zip(loud.layers, found, strict=True):
        kind = tuple(type(module) for module in layer.layer.modules())
        if kind in kinds or not bool(layer.call.output.held.isfinite().all()):
            continue
        kinds.add(kind)
        layer.known = spec
        if _formula(layer, loud) != spec:
            layers[layer.path] = "it computes something else where numbers are large"
            raise NotUnderstood(f"{layer.path}: {layers[layer.path]}")


def match_layer(site, context) -> Match | Skip | None:
    """A layer of the stack."""
    found = context.share("decoder layers", dict).get(site.path)
    if found is None:
        return None
    return Match(found, covers=None) if isinstance(found, LayerForward) else Skip(found)


RULES = (
    Rule("language model", match_decoder),
    Rule("decoder layer", match_layer),
    Rule("output head", match_head),
    Rule("RMS norm", match_rms_norm),
    Rule("layer norm", match_layer_norm),
)
