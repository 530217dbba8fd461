"""Which models are encoders that can be packed, and the trial that says so."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn

from accel.comparison import relative_rms
from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.rule import GraphForward, graph_obstacle, match_graph
from accel.cuda_graphs.runner import GraphRunner
from accel.cuda_graphs.small_calls import SmallCalls
from accel.encoders.bidirectional_attention import BidirectionalSpec
from accel.encoders.encoder import EncoderForward
from accel.encoders.inputs import (
    HEARD,
    PLACES,
    SOUNDS,
    TEXT,
    Inputs,
    inputs_of,
    masked_sound,
    pad_token,
    random_mask,
    small_call,
    tensors_of,
    unread,
    wide_call,
)
from accel.encoders.own_attention import ALONE, OwnAttention, OwnCodeForward, own_attentions
from accel.encoders.own_code import hides_all_from_some
from accel.encoders.packing import ignores_padding
from accel.encoders.picture_sizes import picture_sizes
from accel.encoders.position_bias import PositionBiasForward, long_text
from accel.encoders.recording import understand_encoder, understand_windows
from accel.encoders.stack import EncoderLayerForward
from accel.encoders.windows import blocks_in
from accel.errors import reason_of
from accel.fusion.stacked_linears import Stacked
from accel.libraries.attention import ATTENTION
from accel.libraries.cache import cache_of
from accel.libraries.models import is_causal_lm, is_seq2seq
from accel.llm.attention.position_terms import POSITIONS
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.inputs import example_ids, last_positions
from accel.llm.recording.position_table import within_tables
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import Writes, resting
from accel.patching.fast_forward import as_written
from accel.patching.rule import Change, Context, ForwardPatch, Match, Rule, Site, Skip, first_of
from accel.patching.structure import meta_weights, placement, side_effects
from accel.tolerances import LOGITS, bound

GRAPH = Rule("CUDA graph", match_graph)


def match_encoder(site: Site, context: Context, root: nn.Module) -> Match | Skip | None:
    """The innermost model of transformers around layers that text or an image goes through in both directions."""
    model: Any = site.module
    inputs = inputs_of(model)
    if inputs is None or (inputs is TEXT and is_causal_lm(root)):
        return None
    if any(inputs_of(one) == inputs for one in list(model.modules())[1:]):
        return None
    if (getattr(model.config, "is_encoder_decoder", False) or _in_decoder(model, root)) and (
        cast(Any, root).get_encoder() is not model
    ):
        return None  # its decoder, or no part that reads a text alone
    if meta_weights(model):
        return Skip("weights are not loaded (meta device)")
    if (reason := side_effects(model)) is not None:
        return Skip(reason)
    try:
        example = small_call(model, inputs)
        stack, specs, order, stops = _understand(model, example, inputs)
        if any(cast(BidirectionalSpec, spec.attention).starts is not None for spec in specs.values()):
            inputs = inputs._replace(in_one_row=True)
        steps = context.of(ForwardContext)
        before = f"{site.path}." if site.path else ""
        fused = [
            EncoderLayerForward(
                model.get_submodule(path), before + path, context.kernels, context.log, spec=spec, steps=steps
            )
            for path, spec in specs.items()
        ]
        calls = context.of(SmallCalls)
        around = model if inputs.mask == PLACES else root  # which leaves out what it gives of padding, or not
        held = {"root": around, "inputs": inputs, "stack": stack, "layers": fused, "order": order, "steps": steps}
        held |= {
            "kinds": frozenset(map(type, model.modules())),
            "implementation": getattr(model.config, ATTENTION, None),
            "runner": None,
            "calls": calls,
            "stops": stops if inputs.in_one_row else set(),
        }
        forward = EncoderForward(model, site.path, context.kernels, context.log, **held)
        forward.settings = forward.told()
        with resting(model), math_attention(), as_written():
            forward.sizes = picture_sizes(model, example)
            sounds = inputs.main in SOUNDS and not inputs.in_one_row
            forward.inputs = masked_sound(model, inputs, example) if sounds else inputs
        try:
            _try(forward, example)
        except NotUnderstood:
            if forward.inputs == inputs or HEARD in example:
                raise
            forward.inputs = inputs  # calls with a mask run stock
            _try(forward, example)
        inputs = forward.inputs
        masked = inputs.mask in inspect.signature(model.forward).parameters
        inner = any(layer.inner for layer in fused)  # own code, which reads more than a graph of layers is given anew
        if (graphs := context.options.graphs) is not False and (masked or inputs.in_one_row) and not inner:
            pool = context.of(GraphPool)
            forward.runner = GraphRunner(model, site.path, pool, context.log, graph_obstacle, graphs is True)
        calls.packed = calls.packed or masked
    except Writes as reason:
        return Skip(str(reason))
    except NotUnderstood as reason:
        return _own_code(site, context, inputs, str(reason))
    zeros = context.options.padding == "zeros" and not inner  # whose convolutions mix rows
    outside = (root is not model or inputs.mask == PLACES) and masked and inputs.main not in SOUNDS
    part = fused[-1].module if inputs.mask == PLACES else model
    forward.blind = zeros or (outside and ignores_padding(forward.root, part, inputs, example))
    if outside and not forward.blind and inputs == TEXT and (pad := pad_token(root)) is not None:
        words, shown = example[TEXT.main], random_mask(inputs, example).bool()
        words = torch.where(words == pad, (words + 1) % (int(words.max()) + 1), words).masked_fill(~shown, pad)
        forward.blind = ignores_padding(root, model, inputs, example | {TEXT.main: words})
        forward.pad = pad if forward.blind else None
    forward.unseen = zeros
    patches: list[Change] = [*_patches(forward)]
    patches += [Stacked(linears) for layer in fused if (linears := layer.stacks())]
    note = "packed: padding is left out" if forward.blind else "packed: rows of padding are seen, and computed"
    note = note if masked else "inputs of any sizes in one row" if inputs.in_one_row else "without padding"
    note += "; own code of layers runs around their attention" if inner else ""
    note = note if stack else "in windows of pictures"
    match = Match(forward, tuple(patches), covers=(stack,) if stack else tuple(specs), note=note)
    # Of any sizes, which the code around the layers waits for the GPU to learn.
    return match if inputs.in_one_row else _in_graph(match, site, context, masked and inputs.main not in SOUNDS)


def _understand(model: Any, example: dict[str, Any], inputs: Inputs) -> tuple:
    """See `understand_encoder`."""
    try:
        return understand_encoder(model, example)
    except NotUnderstood as reason:
        if inputs is TEXT or not blocks_in(model):
            raise
        try:
            return understand_windows(model, example)
        except NotUnderstood:
            raise reason from None


def _in_decoder(model: nn.Module, root: Any) -> bool:
    """Whether it is part of what writes, as in Donut, whose steps are fused otherwise."""
    return is_seq2seq(root) and any(one is model for one in root.get_decoder().modules())


def _own_code(site: Site, context: Context, inputs: Inputs, reason: str) -> Match | Skip | None:
    """Of a model whose layers are not understood, for this reason: its attentions alone are fused."""
    model: Any = site.module
    place = context.kernels, context.log
    forward = OwnCodeForward(model, site.path, *place, inputs=inputs, tried=placement(model)[1])
    masked, told = inputs.mask in forward.names, None
    try:
        example = small_call(model, inputs)
        masks = [random_mask(inputs, example, one) for one in (False, True, True) if masked]
        for mask in masks[2:]:
            mask[1:] = 0
        calls = [example, *(example | {inputs.mask: one} for one in masks)]
        with resting(model), math_attention():
            found = own_attentions(model, example)
            patches = tuple(ForwardPatch(one, OwnAttention(one, path, *place)) for path, one in found.items())
            with as_written():
                wanted = [_seeded(model, forward.stock, call) for call in calls]
            with _applied(forward, patches):
                found_out = [_differs(forward, *pair) for pair in zip(calls, wanted, strict=True)]
            forward.rounds = masked and found_out.pop() is not None
            told = next(filter(None, found_out), None)
    except NotUnderstood as other:
        told = str(other)
    if told or not found or inputs.in_one_row:
        # With strict=True a graph of the whole model, and its norms, count as nothing left out.
        return (
            None
            if context.options.strict
            else Skip(f"{reason}; nor are its attentions alone: {told}" if told else reason)
        )
    note = f"{len(found)} {ALONE}, as {reason}"
    return _in_graph(Match(forward, patches, covers=(), note=note), site, context, False)


def _in_graph(match: Match, site: Site, context: Context, masked: bool) -> Match:
    """It, inside of a graph of the whole module where there is to be one."""
    forward: Any = match.forward
    if not masked and context.options.graphs is not False and site.path not in context.graph_paths:
        inside = GraphForward(site.module, site.path, context)  # which is called by itself, or by what is no graph
        inside.inner = forward
        return replace(match, forward=inside)
    if site.path not in context.graph_paths:
        return match
    graph = first_of((GRAPH,), site, context)
    if isinstance(graph, Match) and isinstance(graph.forward, GraphForward):
        graph.forward.inner = forward
        return replace(match, forward=graph.forward, note=f"{match.note}; {graph.note}")
    return match


def _try(forward: EncoderForward, example: dict[str, Any]) -> None:
    """Compares small calls with stock. Raises NotUnderstood where they differ."""
    model, inputs, mask, main = forward.module, forward.inputs, forward.inputs.mask, example[forward.inputs.main]
    more: list[dict[str, Any]] = [{}]
    if mask in forward.names:
        right, left = ({mask: random_mask(inputs, example, turned)} for turned in (False, True))
        more += [right, left]
    if inputs == TEXT and POSITIONS in forward.names:
        places = last_positions(model, main).get(POSITIONS, torch.arange(main.shape[1], device=main.device))
        more.append(right | {POSITIONS: places.flip(-1).expand_as(main)})  # of which some layers scale queries
    calls = [example | one for one in more]
    own = any(layer.attention.own_code for layer in forward.layers)
    if inputs == TEXT and own:  # which may have windows
        calls.append({TEXT.main: example_ids(model, long_text(model))[:1]})
    with resting(model), math_attention():
        with as_written(), within_tables():  # no configuration says how long a table must be
            calls += wide_call(model, inputs, example) if inputs != TEXT else []
            wanted = [_seeded(model, forward.stock, call) for call in calls]
            everywhere = all(layer.attention.reach is None and not layer.inner for layer in forward.layers)
            forward.alike = own and everywhere and mask in forward.names and hides_all_from_some(model, calls[1])
            forward.caches = cache_of(wanted[0]) is not None
            forward.unread = unread(model, example, inputs, forward.names)
        pairs = list(zip(calls, wanted, strict=True))
        # There rows of padding hang on the attention that the model was made with.
        turned = [pairs.pop(2)] if mask in forward.names and forward.sight.distances else []
        with _applied(forward, _patches(forward)):
            fitting: list[bool] = []
            for forward.shows in (False, True):
                tried = (_differs(forward, *pair) for pair in pairs)
                reason = next(filter(None, tried), None)
                if reason is None and (forward.shows or mask not in forward.names or not _reads(forward, calls[1:3])):
                    fitting.append(forward.shows)
                    if inputs == TEXT and mask in forward.names:
                        # Of one number alone, all scores would be more by as much, which softmax does not show.
                        more_or_less = torch.arange(main.shape[1], device=main.device) % 2 + 1
                        forward.calls.weighs |= _weighs(forward, example | {mask: right[mask] * more_or_less})
                    if not any(_differs(forward, *pair) for pair in turned):
                        return
    if not fitting:
        raise NotUnderstood(reason)
    forward.shows, forward.mirrors = fitting[0], False


def _reads(forward: EncoderForward, masked: list[dict[str, Any]]) -> bool:
    """Whether code around the layers, which give here what they are given, makes anything of a mask: in 16 bits places
    of patches may be within the bound.
    """
    vars(forward)["run"], forward.shows = lambda mask, step: step.hidden, True
    try:
        shown = [_seeded(forward.module, forward.fast, call) for call in masked]
        forward.shows = False
        return any(_differs(forward, *pair, most=0.0) for pair in zip(masked, shown, strict=True))
    except Exception as error:  # whatever the model's own code may raise
        reason_of(error)
        return False
    finally:
        del vars(forward)["run"]
        forward.shows = False


def _weighs(forward: EncoderForward, call: dict[str, Any]) -> bool:
    """Whether the model computes with numbers of its mask, of which this call has others than 0 and 1."""
    try:
        with as_written(), within_tables():
            wanted = _seeded(forward.module, forward.stock, call)
    except Exception as error:  # of numbers that the model refuses
        reason_of(error)
        return True
    return _differs(forward, call, wanted) is not None


def _seeded(model: Any, forward: Callable, call: dict) -> Any:
    """What it gives, with random numbers that are the same each time: some hide patches by chance.

    The model is as before then: blocks of windows remember the smallest picture.
    """
    with resting(model), torch.random.fork_rng():
        torch.manual_seed(0)
        return forward(**call)


def _differs(
    forward: EncoderForward | OwnCodeForward, call: dict, wanted: Any, most: float | None = None
) -> str | None:
    """How far it is from what was wanted, where that is more than the bound, or this."""
    told = "".join(f" with {name}" for name in call if name != forward.inputs.main)
    if (reason := forward.unfit(**call)) is not None:
        return reason
    try:
        got = _seeded(forward.module, forward.fast, call)
    except Exception as error:  # whatever the model's own code may raise
        return f"the trial{told} raised {reason_of(error)}"
    found = tensors_of(got)
    for name, one in tensors_of(wanted).items():
        if one.is_floating_point():
            off = relative_rms(found.get(name, one.new_empty(0)), one)
            if not off <= (bound(LOGITS, one.dtype) if most is None else most):
                return f"it computes something else{told}: {name} is off by {off:.1e}"
    return None


def _patches(forward: EncoderForward) -> list[ForwardPatch]:
    """The forwards of its layers, and of embeddings of biases that are made outside of these."""
    inside = {one for layer in forward.layers for one in layer.module.modules()}
    paths = {bias.path for layer in forward.layers if (bias := layer.attention.position_bias) is not None}
    found = [(path, forward.module.get_submodule(path)) for path in paths]
    unread = [
        PositionBiasForward(one, path, forward.kernels, forward.log, steps=forward.steps)
        for path, one in found
        if one not in inside
    ]
    attentions = [one for layer in forward.layers for one in layer.inner]
    return [ForwardPatch(one.module, one) for one in (*forward.layers, *attentions, *unread)]


@contextmanager
def _applied(forward: EncoderForward | OwnCodeForward, patches: Sequence[ForwardPatch]) -> Iterator[None]:
    """Inside, the layers take part in steps. Weights stay where they are."""
    forward.apart = True
    with ExitStack() as undo:
        for patch in patches:
            patch.apply()
            undo.callback(patch.undo)
        try:
            yield
        finally:
            forward.seen, forward.apart = None, False
