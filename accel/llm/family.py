"""What makes a model a causal language model, and the rules for it."""

import inspect

import torch
from accel_kernels.rehearsal import prepare
from torch import nn

from accel.failure import Refused
from accel.graphs import GraphRunner
from accel.llm.cache_rounding import choose, described
from accel.llm.check import find_manner, rehearse
from accel.llm.decoder import DecoderForward
from accel.llm.experts import match_experts
from accel.llm.formulas import formulas
from accel.llm.head import HEAD, match_head
from accel.llm.layer import LayerForward
from accel.llm.layer_spec import LayerSpec
from accel.llm.prompt import Prompts
from accel.llm.quant.quantisation import Quantisation
from accel.llm.record import LayerRecord
from accel.llm.recorder import decoder_layers, side_effects
from accel.llm.request import seams
from accel.llm.step import Steps
from accel.llm.surroundings import relied_on
from accel.llm.understanding import NotUnderstood
from accel.patch import ForwardPatch, Stacked
from accel.quant.row_rounding import rounding
from accel.rule import Match, Rule, Skip
from accel.rules.graph import obstacle
from accel.rules.norms import match_layer_norm, match_rms_norm
from accel.site import Site
from accel.structure import meta_weights

QUANTISATION = "quantisation"  # the name under which the sites of a model share it


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
    if next(site.module.parameters()).is_cuda:
        prepare()  # while the model is examined
    context.shared[HEAD] = site.module.get_output_embeddings()
    layers = context.share("decoder layers", dict)
    try:
        specs = _understand(site.module, layers, scores=context.options.kv_cache is not None)
    except NotUnderstood as reason:
        if (quantisation := _quantisation(site.module, context)) is not None:
            quantisation.run(site.module)
        return _not_whole(layers, reason, context.options)
    # After the model was understood in its own precision, before anything is bound to its weights.
    if (quantisation := _quantisation(site.module, context)) is not None:
        quantisation.run()
    try:
        forward, patches, note = _bind(site.module, context, specs)
    except NotUnderstood as reason:
        return _not_whole(layers, reason, context.options)
    layers.update({layer.path: layer for layer in forward.layers})
    device = next(site.module.parameters()).device.type
    waits = forward.runner is not None and device != "cuda"
    notes = (note, f"CUDA graphs wait for CUDA; the model is on {device}" if waits else "")
    return Match(forward, patches, (), "; ".join(filter(None, notes)))


def _not_whole(layers: dict, reason: NotUnderstood, options) -> Skip:
    for path, found in layers.items():
        if not isinstance(found, str):
            layers[path] = "understood, but not the whole model"
    return Skip(f"{reason}{'' if options.kv_cache is None else '; kv_cache changes nothing'}")


def _quantisation(model: nn.Module, context) -> Quantisation | None:
    """What the options ask for."""
    if context.options.weights is None:
        return None
    return context.share(QUANTISATION, lambda: Quantisation(model, context.options))


def _understand(model: nn.Module, layers: dict, scores: bool) -> list[tuple[LayerRecord, LayerSpec]]:
    """The formula of every layer; see `formulas`. Raises NotUnderstood."""
    if "past_key_values" not in inspect.signature(type(model).forward).parameters:
        raise NotUnderstood("its forward takes no cache")
    words = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(words, torch.Tensor) or words.dim() != 2:
        raise NotUnderstood("it has not one table of embeddings")
    reason = side_effects(model) or ("weights not loaded" if meta_weights(model) else None)
    if reason is not None:
        raise NotUnderstood(reason)
    if len({p.device for p in model.parameters()}) > 1:
        raise NotUnderstood("weights on several devices")
    return formulas(model, layers, scores)


def _bind(model: nn.Module, context, specs: list[tuple[LayerRecord, LayerSpec]]) -> tuple[DecoderForward, tuple, str]:
    """The forward that computes by these formulas, tried as a whole; its patches; what the report says of its cache.

    Raises NotUnderstood.
    """
    stack, _ = decoder_layers(model)
    steps = Steps()
    parts = (context.kernels, context.ledger)
    forwards = [LayerForward(layer.layer, layer.path, *parts, spec, steps) for layer, spec in specs]
    forward = DecoderForward(model, "", *parts, stack, forwards, steps)
    forward.manner = find_manner(forward)
    forward.relied, forward.around = relied_on(forward)
    note = ""
    if context.options.kv_cache is not None:
        note = _round(forward, specs, context.options)
    elif rounding(model):
        rehearse(forward)
    if context.options.graphs is not False:
        keep = context.options.graphs is True
        graphs = ("", context.pool, context.ledger, obstacle, keep)
        forward.runner = GraphRunner(model, *graphs)
        runners = [forward.runner]
        if forward.manner.fills:
            runners.append(GraphRunner(model, *graphs))
            forward.prompts = Prompts(runners[1])
        for runner in runners:
            runner.passed, runner.beside = forward.manner.passed, forward.relied
    stacks = (layer.stacks() for layer in forwards)
    patches = tuple(Stacked(linears) for linears in stacks if linears)
    return forward, (*patches, *seams(model, forward)), note


def _round(forward: DecoderForward, specs: list, options) -> str:
    """Once the exact forward agrees with stock: keeps keys and values as kv_cache says. For the report."""
    kind, device = options.kv_cache, forward.shapes()[0].device
    codes, told = choose(kind, device, ((layer, spec.attention) for layer, spec in specs))
    forward.round(codes)
    note = described(kind, forward.shapes(), told)
    if told and options.strict:
        raise Refused(f"strict=True: kv_cache={kind!r}: {note}")
    rehearse(forward)
    return note


def match_layer(site, context) -> Match | Skip | None:
    """A layer of the stack."""
    found = context.share("decoder layers", dict).get(site.path)
    if found is None:
        return None
    if not isinstance(found, LayerForward):
        return Skip(found)
    inside = (Site(f"{site.path}.{name}", module) for name, module in site.module.named_modules() if name)
    answers = ((one, match_experts(one, context)) for one in inside)
    experts = [ForwardPatch(one.module, answer.forward) for one, answer in answers if isinstance(answer, Match)]
    return Match(found, patches=tuple(experts), covers=None)


RULES = (
    Rule("language model", match_decoder),
    Rule("decoder layer", match_layer),
    Rule("output head", match_head),
    Rule("experts", match_experts),
    Rule("RMS norm", match_rms_norm),
    Rule("layer norm", match_layer_norm),
)
