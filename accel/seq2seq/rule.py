"""Which encoder-decoder models have their steps run over a cache at fixed addresses."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accel_kernels.attention.math_attention import math_attention
from torch import nn

from accel.cuda_graphs.pool import GraphPool
from accel.cuda_graphs.rule import graph_obstacle
from accel.cuda_graphs.runner import GraphRunner
from accel.errors import Refused, SkippedSite, Unfit, reason_of
from accel.fusion.stacked_linears import Stacked
from accel.libraries.models import is_seq2seq
from accel.llm.parts.linear import weights
from accel.llm.parts.step import ForwardContext
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import model_side_effects, resting
from accel.llm.runtime.kv_quantization import kv_dtype_for, rounding_loss
from accel.llm.runtime.lm_head import StepHeadForward
from accel.options import Options
from accel.patching.rule import Change, Context, ForwardPatch, Match, Patch, Site, Skip
from accel.patching.structure import meta_weights, placement, side_effects
from accel.seq2seq.decoder import Seq2SeqForward
from accel.seq2seq.generate import generate_patches
from accel.seq2seq.layers import DecoderLayerForward, understand_decoder
from accel.seq2seq.step_trial import StepTrial, patches_of

T = TypeVar("T")


def match_seq2seq(site: Site, context: Context) -> Match | Skip | None:
    """The model that generates."""
    model: Any = site.module
    if site.path or not is_seq2seq(model):
        return None
    options = context.options
    if options.graphs is False:
        return _skipped("graphs=False, and its steps gain by them alone", options)
    stays = options.cpu != "fuse" and not (options.strict or options.lossy or torch.cuda.is_available())
    if stays and placement(model)[0].type == "cpu":
        return Skip("its steps run stock on a CPU")  # and a trial of a large model takes long there
    forward = Seq2SeqForward(model, site.path, context.kernels, context.log, runner=None)
    reason = "weights are not loaded (meta device)" if meta_weights(model) else None
    reason = reason or side_effects(model) or model_side_effects(model)
    trial, covers, layers = None, tuple[str, ...](), ""
    try:
        if reason is None:
            trial = _try(forward, lambda: StepTrial(forward).run())
    except NotUnderstood as error:
        reason = str(error)
    if trial is not None:
        try:
            stack, rounds = _understand(forward, trial, context)
            covers, layers = (stack,), f"fused{rounds}"
        except NotUnderstood as error:
            reason, layers = trial.reason, f"in the model's own code: {error}"
            if options.kv_cache is not None:
                _skipped(f"its steps run {layers}", options)
    if reason is not None:
        # With strict=True its encoder, and norms, count as nothing left out.
        return None if options.strict and not options.kv_cache else _skipped(f"its steps run stock: {reason}", options)
    patches: list[Change] = [*patches_of(forward), *_of_head(forward, context), *generate_patches(forward)]
    patches += [Stacked(linears) for layer in forward.layers for linears in layer.all_stacks()]
    keep = context.options.graphs is True
    forward.runner = GraphRunner(model, "", context.of(GraphPool), context.log, graph_obstacle, keep)
    # No step reads the encoder: what changes there is none of its business.
    forward.runner.ignored = tuple((path, "") for path, one in model.named_modules() if one is model.get_encoder())
    device = placement(model)[0].type
    waits = "" if device == "cuda" else f"; CUDA graphs wait for CUDA; the model is on {device}"
    first = "" if forward.begins else " and the first tokens"
    note = f"steps of the decoder in one graph, its layers {layers}; the encoder{first} as stock{waits}"
    return Match(forward, tuple(patches), covers=covers, note=note)


def _skipped(reason: str, options: Options) -> Skip:
    """Raises `Refused` where the steps are to keep what an encoder gave in 8 bits."""
    if options.kv_cache is not None:
        raise Refused(f"kv_cache={options.kv_cache!r}: {reason}")
    return Skip(reason)


def _understand(forward: Seq2SeqForward, trial: StepTrial, context: Context) -> tuple[str, str]:
    """Has the layers fused in steps. Returns the path of their stack, and what is kept in 8 bits. Raises
    NotUnderstood.
    """
    model = forward.module
    kind = context.options.kv_cache
    codes = None if kind is None else kv_dtype_for(kind, placement(model)[0])
    stack, halves, left = understand_decoder(model, trial.prompt(), kind)
    forward.steps = context.of(ForwardContext)
    layers = [
        DecoderLayerForward(layer, f"{stack}.{name}", context.kernels, context.log, halves=both, steps=forward.steps)
        for (name, layer), both in zip(model.get_submodule(stack).named_children(), halves, strict=True)
    ]
    forward.layers, forward.apart = layers, True
    try:
        _try(forward, trial.again)
    except NotUnderstood:
        forward.layers, forward.begins = (), 0
        raise
    finally:
        forward.apart = False
    told = rounding_loss(left, placement(model)[1]) if left else kind
    if left and context.options.strict:
        raise SkippedSite(f"strict=True: kv_cache={kind!r}: {told}")
    forward.codes = None if left else codes
    return stack, "" if kind is None else f"; what the encoder gave in {told}"


def _of_head(forward: Seq2SeqForward, context: Context) -> list[Patch]:
    """What has steps compute the output head, of plain weights, where they compute the layers."""
    head: Any = forward.module.get_output_embeddings()
    plain = weights(head) if forward.layers and type(head) is nn.Linear else None
    if plain is None or plain.in_blocks:
        return []
    path = next(path for path, one in forward.module.named_modules() if one is head)
    return [ForwardPatch(head, StepHeadForward(head, path, context.kernels, context.log, steps=forward.steps))]


def _try(forward: Seq2SeqForward, run: Callable[[], T]) -> T:
    """What it gives. Raises NotUnderstood. After it the forward holds nothing of what it was tried on."""
    try:
        with resting(forward.module), math_attention():
            return run()
    except NotUnderstood:
        raise
    except Unfit as unfit:
        raise NotUnderstood(str(unfit)) from unfit
    except Exception as error:  # whatever a forward may raise
        raise NotUnderstood(f"the trial raised {reason_of(error)}") from error
    finally:
        forward.renew()
