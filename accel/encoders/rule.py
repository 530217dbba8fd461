"""Which models are encoders that can be packed, and the trial that says so."""

import inspect
from collections.abc import Iterator
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
from accel.encoders.encoder import MASK, EncoderForward
from accel.encoders.position_bias import PositionBiasForward, long_text
from accel.encoders.recording import layers_in, random_mask, understand_encoder
from accel.encoders.stack import EncoderLayerForward
from accel.errors import reason_of
from accel.fusion.stacked_linears import Stacked
from accel.in_flight import listening
from accel.libraries.cache import Cache
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import example_ids, few, resting
from accel.patching.fast_forward import as_written
from accel.patching.rule import Change, Context, ForwardPatch, Match, Rule, Site, Skip, first_of
from accel.patching.structure import meta_weights, placement, side_effects
from accel.tolerances import LOGITS, bound

GRAPH = Rule("CUDA graph", match_graph)


def match_encoder(site: Site, context: Context, root: nn.Module) -> Match | Skip | None:
    """The innermost model of transformers around a stack of layers that text goes through in both directions."""
    model: Any = site.module
    if not _takes_text(model) or any(map(_takes_text, list(model.modules())[1:])):
        return None
    if getattr(model.config, "is_encoder_decoder", False) and cast(Any, root).get_encoder() is not model:
        return None  # its decoder, or no part that reads a text alone
    if meta_weights(model):
        return Skip("weights are not loaded (meta device)")
    if (reason := side_effects(model)) is not None:
        return Skip(reason)
    try:
        stack, specs, order = understand_encoder(model)
        steps = context.of(ForwardContext)
        before = f"{site.path}." if site.path else ""
        fused = [
            EncoderLayerForward(layer, before + path, context.kernels, context.log, spec=spec, steps=steps)
            for (path, layer), spec in zip(layers_in(model, stack).items(), specs, strict=True)
        ]
        calls, runner = context.of(SmallCalls), None
        if (graphs := context.options.graphs) is not False:
            pool = context.of(GraphPool)
            runner = GraphRunner(model, site.path, pool, context.log, graph_obstacle, graphs is True)
        held = {"root": root, "stack": stack, "layers": fused, "order": order, "steps": steps}
        held |= {"runner": runner, "calls": calls}
        forward = EncoderForward(model, site.path, context.kernels, context.log, **held)
        forward.settings = forward.told()
        _try(forward)
        calls.packed = True
    except NotUnderstood as reason:
        # With strict=True a graph of the whole model, and its norms, count as nothing left out.
        return None if context.options.strict else Skip(str(reason))
    zeros = context.options.padding == "zeros"
    forward.blind = zeros or (root is not model and ignores_padding(root, model))
    forward.unseen = zeros
    patches: list[Change] = [*_patches(forward)]
    patches += [Stacked(linears) for layer in fused if (linears := layer.stacks())]
    note = "packed: padding is left out" if forward.blind else "packed: rows of padding are seen, and computed"
    match = Match(forward, tuple(patches), covers=(stack,), note=note)
    if site.path not in context.graph_paths:
        return match
    graph = first_of((GRAPH,), site, context)
    if isinstance(graph, Match) and isinstance(graph.forward, GraphForward):
        graph.forward.inner = forward
        return replace(match, forward=graph.forward, note=f"{note}; {graph.note}")
    return match


def _takes_text(module: nn.Module) -> bool:
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        return False
    names = inspect.signature(type(module).forward).parameters
    lists = any(type(one) is nn.ModuleList for one in module.modules())
    return lists and "input_ids" in names and MASK in names


def _try(forward: EncoderForward) -> None:
    """Compares small calls with stock. Raises NotUnderstood where they differ."""
    model, ids = forward.module, example_ids(forward.module, few(forward.module))
    right, left = random_mask(ids), random_mask(ids, left=True)
    calls: list[dict[str, torch.Tensor]] = [{}, {MASK: right}, {MASK: left}]
    calls = [{"input_ids": ids, **call} for call in calls]
    if "position_ids" in forward.names:
        places = torch.arange(ids.shape[1], device=ids.device).flip(0).expand_as(ids)
        calls.append({"input_ids": ids, MASK: right, "position_ids": places})
    if any(layer.attention.own_code for layer in forward.layers):  # which may have windows
        calls.append({"input_ids": example_ids(model, long_text(model))[:1]})
    with resting(model), math_attention():
        with as_written():
            wanted = [forward.stock(**call) for call in calls]
        pairs = list(zip(calls, wanted, strict=True))
        # There rows of padding hang on the attention that the model was made with.
        turned = [pairs.pop(2)] if forward.sight.distances else []
        with _applied(forward):
            fitting = []
            for forward.shows_mask in (False, True):
                tried = (_differs(forward, *pair) for pair in pairs)
                if (reason := next(filter(None, tried), None)) is None:
                    fitting.append(forward.shows_mask)
                    if not any(_differs(forward, *pair) for pair in turned):
                        return
    if not fitting:
        raise NotUnderstood(reason)
    forward.shows_mask, forward.mirrors = fitting[0], False


def _differs(forward: EncoderForward, call: dict, wanted: Any) -> str | None:
    told = "".join(f" with {name}" for name in call if name != "input_ids")
    if (reason := forward.unfit(**call)) is not None:
        return reason
    try:
        got = forward.fast(**call)
    except Exception as error:  # whatever the model's own code may raise
        return f"the trial{told} raised {reason_of(error)}"
    found = dict(_numbers(got))
    for name, one in _numbers(wanted):
        if one.is_floating_point():
            off = relative_rms(found[name], one) if name in found else float("inf")
            if not off <= bound(LOGITS, one.dtype):
                return f"it computes something else{told}: {name} is off by {off:.1e}"
    return None


def _numbers(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an output, and those in its cache."""
    for name, one in output.items():
        if isinstance(one, torch.Tensor):
            yield name, one
        elif isinstance(one, Cache):
            held = ((f"{name} {at} {n}", t) for at, layer in enumerate(one.layers) for n, t in vars(layer).items())
            yield from ((where, t) for where, t in held if isinstance(t, torch.Tensor))


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
    return [ForwardPatch(one.module, one) for one in (*forward.layers, *unread)]


@contextmanager
def _applied(forward: EncoderForward) -> Iterator[None]:
    """Inside, the layers take part in steps. Weights stay where they are."""
    forward.apart = True
    with ExitStack() as undo:
        for patch in _patches(forward):
            patch.apply()
            undo.callback(patch.undo)
        try:
            yield
        finally:
            forward.seen, forward.apart = None, False


def ignores_padding(root: nn.Module, model: Any) -> bool:
    """Whether what the root gives of padded texts is the same to the bit whatever the encoder gives in rows of padding
    behind them.
    """
    ids = example_ids(model, few(model))
    mask = random_mask(ids)
    hidden = mask.bool().logical_not().to(placement(model)[0])
    generator = torch.Generator().manual_seed(0)

    def other(module: nn.Module, args: Any, output: Any) -> Any:
        for name, one in output.items():
            if isinstance(one, torch.Tensor) and one.shape[:2] == ids.shape:
                noise = torch.randn(one.shape, generator=generator, device="cpu").to(one)
                output[name] = torch.where(hidden[..., None], noise, one)
        return output

    try:
        with resting(root), math_attention(), as_written():
            plain = type(root).forward(root, input_ids=ids, **{MASK: mask})
            with listening([(model, other)]):
                changed = [type(root).forward(root, input_ids=ids, **{MASK: mask}) for _ in range(2)]
    except Exception as error:  # a head that takes other inputs
        reason_of(error)
        return False
    tensors = {name: one for name, one in plain.items() if isinstance(one, torch.Tensor)}
    return bool(tensors) and all(torch.equal(one, now[name]) for now in changed for name, one in tensors.items())
