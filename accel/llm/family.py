"""The rules for causal language models."""

from functools import partial
from itertools import product

from transformers import PreTrainedModel

from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.rule import obstacle
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import SkippedSite
from accel.fusion.norms import match_layer_norm, match_rms_norm
from accel.fusion.stacked_linears import Stacked
from accel.libraries.versions import newer_than_tested
from accel.llm.batching.hook import batching_hook
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.layer_forward import LayerForward
from accel.llm.generation.loop.hooks import generate_hooks
from accel.llm.generation.mixed import MixedForward
from accel.llm.generation.prefill import Prompts, kernel_key_of
from accel.llm.generation.self_test import find_convention, guard_of, try_partial
from accel.llm.generation.trial_warmup import warm_up
from accel.llm.moe.experts import ExpertsForward, match_experts
from accel.llm.moe.router import RouterForward, match_router
from accel.llm.parts.step import ForwardContext
from accel.llm.parts.thresholded_mlp import match_thresholded_mlp
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.placement import Placement
from accel.llm.pipeline.stretch import StretchGraphs, StretchLayer
from accel.llm.recording.record import LayerRecord, NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.llm.runtime.analyze import Analysis
from accel.llm.runtime.kv_quantization import choose_kv_dtypes, described
from accel.llm.runtime.layer_spec import LayerSpec
from accel.llm.runtime.lm_head import OutputHead, match_head, match_table
from accel.llm.runtime.scaled_inputs import ScaledInputsForward, match_scaled_inputs
from accel.parallel.agreement import all_agree
from accel.patching.fast_forward import FastForward
from accel.patching.rule import Context, ForwardPatch, Match, Rule, Site, Skip
from accel.quantization.activation_quantization import rounding_linears

Mixing = ExpertsForward | RouterForward | ScaledInputsForward
PARTIAL = "understood, but not the whole model"
ATTENTION_STOCK = "attention runs stock"
BATCH_EAGER_CALLS = 4  # of a step size, before its graph is captured: many sizes of batches come a few times only


class DecoderLayers:
    """By path, the forward of each layer or why it has none; and those of experts and routers in them."""

    def __init__(self) -> None:
        self.found: dict[str, LayerForward | str] = {}
        self.inside: dict[str, Mixing | str] = {}
        self.rules: dict[str, str] = {}  # by which rule


def match_decoder(site: Site, context: Context) -> Match | Skip | None:
    """The model itself, where every one of its layers was understood and the whole agrees with stock."""
    if site.path:
        return None
    model: PreTrainedModel = site.module
    context.put(OutputHead(model.get_output_embeddings()))
    analysis, layers = context.of(Analysis), context.of(DecoderLayers).found
    layers.update({path: found if isinstance(found, str) else PARTIAL for path, found in analysis.layers.items()})
    reason = analysis.reason
    if reason is None and analysis.unknown() is not None and context.find(Placement) is not None:
        reason = f"{analysis.unknown()}; the other layers are not fused between stock ones over several devices"
    if reason is None and analysis.unknown() is not None:
        return _match_some(model, context, layers, analysis.specs)
    if reason is None:
        try:
            forward, patches, note = _bind(model, context, analysis.specs)
        except NotUnderstood as error:
            reason = str(error)
    if reason is not None:
        return _stock(reason, context)
    layers.update({layer.path: layer for layer in forward.layers})
    device = next(model.parameters()).device.type
    waits = forward.runner is not None and device != "cuda"
    notes = (note, f"CUDA graphs wait for CUDA; the model is on {device}" if waits else "")
    return Match(forward, patches, (), "; ".join(filter(None, notes)))


def _stock(reason: str, context: Context) -> Skip:
    """Why the whole model is left as it is; under a library newer than tested, by which it may be, also that."""
    idle = () if context.options.kv_cache is None else ("kv_cache changes nothing",)
    return Skip("; ".join((reason, *idle, *newer_than_tested())))


def _match_some(model: PreTrainedModel, context: Context, layers: dict, specs: list) -> Match | Skip:
    """Some layers fused between stock ones; those with stock attention inside are left out if they do not agree."""
    answer = _tried(model, context, layers, specs)
    around = {layer.path: spec.runs_stock for layer, spec in specs if spec.runs_stock}
    if isinstance(answer, Match) or not around:
        return answer
    layers.update(around)
    understood = [(layer, spec) for layer, spec in specs if not spec.runs_stock]
    if not understood:
        path, reason = next(iter(around.items()))
        return _stock(f"{path}: {reason}", context)
    return _tried(model, context, layers, understood)


def _tried(model: PreTrainedModel, context: Context, layers: dict, specs: list) -> Match | Skip:
    """These layers fused."""
    stack, _ = decoder_layers(model)
    steps, parts = ForwardContext(), (context.kernels, context.log)
    forwards = [LayerForward(layer.layer, layer.path, *parts, spec=spec, steps=steps) for layer, spec in specs]
    forward = MixedForward(model, "", *parts, stack=stack, layers=forwards, steps=steps)
    forward.experts, forward.routers = _inside(forwards, context)
    forward.most_positions = specs[0][0].most_positions
    try:
        try_partial(forward)
        forward.model_guard = guard_of(forward)
    except NotUnderstood as reason:
        return _stock(str(reason), context)
    note = "without CUDA graphs"
    if len(forwards) < len(layers):
        note = f"{len(forwards)} of {len(layers)} layers fused, the others run stock between them, {note}"
    layers.update({layer.path: layer for layer in forwards})
    stacks = (layer.stacks() for layer in forwards)
    patches = (*(Stacked(linears) for linears in stacks if linears), *batching_hook(model, forward))
    return Match(forward, patches, (), note)


def _bind(
    model: PreTrainedModel, context: Context, specs: list[tuple[LayerRecord, LayerSpec]]
) -> tuple[DecoderForward, tuple, str]:
    """The forward by these formulas, tried as a whole; its patches; the report's row of its cache. Raises
    NotUnderstood.
    """
    stack, _ = decoder_layers(model)
    steps = ForwardContext()
    parts, placement = (context.kernels, context.log), context.find(Placement)
    kind = LayerForward if placement is None else StretchLayer
    forwards = [kind(layer.layer, layer.path, *parts, spec=spec, steps=steps) for layer, spec in specs]
    whole = DecoderForward if placement is None else partial(SpreadForward, placement=placement)
    forward = whole(model, "", *parts, stack=stack, layers=forwards, steps=steps)
    forward.experts, forward.routers = _inside(forwards, context)
    forward.most_positions = specs[0][0].most_positions
    divided = placement is not None or forward.ranks is not None
    if divided and any(spec.borrows or spec.around for _, spec in specs):
        raise NotUnderstood("layers read other layers' keys, or run code of their own, and the model is divided")
    if forward.ranks is not None:
        inside = [one.path for one in (*forward.experts, *forward.routers)]
        if not all_agree(forward.ranks, "what experts and routers compute", inside):
            raise NotUnderstood("ranks that share the model do not understand their experts and routers alike")
        forward.ranks.open(next(model.parameters()).device)
    forward.convention = find_convention(forward)
    forward.model_guard = guard_of(forward)
    note = "" if placement is None else placement.description()
    batches: GraphRunner | StretchGraphs | None = None
    if context.options.kv_cache is not None:
        note = "; ".join(filter(None, (note, _round(forward, specs, context.options.kv_cache, context.options.strict))))
    elif rounding_linears(model):
        warm_up(forward)
    if context.options.graphs is not False and isinstance(forward, SpreadForward):
        forward.runner = _graphs(forward, context, context.options.graphs is True)
        # What a graph saves there is time of the host, in which another device gets its work.
        batches = _graphs(forward, context, keep=True)
    elif context.options.graphs is not False:
        keep = context.options.graphs is True
        graphs = ("", context.of(GraphPool), context.log, obstacle, keep)
        forward.runner = GraphRunner(model, *graphs)
        batches = GraphRunner(model, *graphs)
        batches.eager_calls = BATCH_EAGER_CALLS
        runners = [forward.runner, batches]
        if forward.convention.pads_prompts:
            runners.append(GraphRunner(model, *graphs))
            forward.prompts = Prompts(runners[-1], None if "position_ids" in forward.names else forward.most_positions)
        for runner in runners:
            runner.ranks, runner.adapters = forward.ranks, forward.runner.adapters
            runner.trusting = runner is forward.runner or runner is batches
            runner.ignored, runner.watched, runner.kernel_key = (
                forward.convention.ignored_attributes,
                forward.model_guard,
                kernel_key_of,
            )
    stacks = (layer.stacks() for layer in forwards)
    patches = tuple(Stacked(linears) for linears in stacks if linears)
    hooks = (*generate_hooks(model, forward), *batching_hook(model, forward, batches))
    return forward, (*patches, *hooks), note


def _graphs(forward: SpreadForward, context: Context, keep: bool) -> StretchGraphs:
    """Of its stretches. keep: those too that make a stretch by itself no faster."""
    graphs = StretchGraphs(forward.stretches, context.of(GraphPool), context.log, keep)
    for runner in graphs.runners:
        runner.watched, runner.kernel_key = forward.model_guard, kernel_key_of
    return graphs


def _inside(layers: list[LayerForward], context: Context) -> tuple[list[FastForward], list[RouterForward]]:
    """Experts and routers inside the layers, which are tried with them."""
    found = context.of(DecoderLayers)
    sites = [Site(f"{layer.path}.{name}", one) for layer in layers for name, one in layer.own_modules()]
    mixtures: list[str] = []  # of which one forward does the whole work
    for site, rule in product(sites, MIXTURES):
        answer = None if site.path.startswith(tuple(mixtures)) else rule.answer(site, context)
        if answer is not None:
            found.rules[site.path] = rule.name
        if isinstance(answer, Match) and isinstance(answer.forward, Mixing):
            found.inside[site.path] = answer.forward
            mixtures += [f"{site.path}."] if isinstance(answer.forward, ScaledInputsForward) else []
        elif isinstance(answer, Skip):
            found.inside[site.path] = answer.reason
    forwards = found.inside.values()
    return (
        [one for one in forwards if isinstance(one, ExpertsForward | ScaledInputsForward)],
        [one for one in forwards if isinstance(one, RouterForward)],
    )


def _round(forward: DecoderForward, specs: list, kind: str, strict: bool) -> str:
    """Once the exact forward agrees with stock: keeps keys and values as kv_cache says. For the report."""
    device = forward.shapes()[0].device
    layers = ((layer, one) for layer, spec in specs for one in spec.stored)
    kv_dtypes, left = choose_kv_dtypes(kind, device, layers, forward.ranks)
    forward.round(kv_dtypes)
    note = described(kind, forward.shapes(), left)
    if left and strict:
        raise SkippedSite(f"strict=True: kv_cache={kind!r}: {note}")
    warm_up(forward)
    return note


def match_layer(site: Site, context: Context) -> Match | Skip | None:
    """A layer of the stack."""
    found = context.of(DecoderLayers).found.get(site.path)
    if found is None:
        return None
    if not isinstance(found, LayerForward):
        return Skip(found)
    if found.spec.runs_stock is not None and context.options.strict:
        return Skip(f"{ATTENTION_STOCK}: {found.spec.runs_stock}")
    layers = context.of(DecoderLayers)
    inside = {path: one for path, one in layers.inside.items() if path.startswith(f"{site.path}.")}
    forwards = {path: one for path, one in inside.items() if not isinstance(one, str)}
    patches = tuple(ForwardPatch(one.module, one) for one in (*forwards.values(), *found.inner))
    stock = {layers.rules[path]: one for path, one in inside.items() if isinstance(one, str)}
    note = "; ".join(f"{name} run{'' if name == 'experts' else 's'} stock: {reason}" for name, reason in stock.items())
    covers = None
    mixer = found.spec.attention
    if found.inner:
        covers = tuple(one.removeprefix(f"{site.path}.") for one in (*inside, *(one.path for one in found.inner)))
        note = "; ".join(filter(None, ("its own code runs around its attention", note)))
    elif mixer is not None and (reason := found.spec.runs_stock) is not None:
        names = (name for name, _ in found.own_modules())
        covers = tuple(one for one in names if not f"{mixer.name}.".startswith(f"{one}."))
        note = "; ".join(filter(None, (f"{ATTENTION_STOCK}: {reason}", note)))
    elif found.spec.keeps_more is not None:
        note = "; ".join(filter(None, (found.spec.keeps_more, note)))
    return Match(
        found, patches, covers=covers, note=note, inside=tuple((path, layers.rules[path]) for path in forwards)
    )


MIXTURES = (Rule("mixture", match_scaled_inputs), Rule("experts", match_experts), Rule("router", match_router))
RULES = (
    Rule("language model", match_decoder),
    Rule("decoder layer", match_layer),
    Rule("output head", match_head),
    Rule("word embeddings", match_table),
    *MIXTURES,
    Rule("thresholded MLP", match_thresholded_mlp),
    Rule("RMS norm", match_rms_norm),
    Rule("layer norm", match_layer_norm),
)
