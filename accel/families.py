"""Which family a model is of, language models or diffusion, and what follows: its plan, options, and an example call.

Families are imported when needed, so that importing accel stays light.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from accel.errors import SkippedSite
from accel.libraries.code import comes_from
from accel.libraries.models import is_causal_lm as is_language_model
from accel.libraries.models import is_seq2seq
from accel.patching.rule import Context, Rule
from accel.planning.memory import lift_offload, place_weights
from accel.planning.plan import Plan, Row, Stage, StageReport, StageResult
from accel.planning.targets import is_scheduler, stays_stock


class DenoiserAlone:
    """A pipeline's denoiser is quantized, where weights are, and nothing beside it."""


def note_denoiser(context: Context, parts: Iterable[object]) -> None:
    """Whether one of the parts denoises is known before the first is planned."""
    if any(map(_denoises, parts)):
        context.shared.maps[-1][DenoiserAlone] = DenoiserAlone()


def plan_for(part: object, context: Context) -> Plan:
    """How a model, a scheduler or a pipeline becomes fast. context: of all that is optimized together."""
    own = context.for_model()
    plan = _plan_for(part, own)
    return plan.between(lift_offload, place_weights) if isinstance(part, nn.Module) else plan


def _plan_for(part: object, own: Context) -> Plan:
    if isinstance(part, nn.Module):
        if stays_stock(part) is not None:
            return Plan(part, (), own, (leave_stock,))
        if is_language_model(part):
            from accel.llm.stages import language_plan

            return language_plan(part, own, encoder_rules(part))

    from accel.diffusion import family, pipeline, schedulers

    if isinstance(part, nn.Module):
        own.graph_paths = family.graph_paths(part)
        if (own.options.weights or own.options.activations) is not None and _denoises(part):
            from accel.diffusion.stages import denoiser_plan

            return denoiser_plan(part, own)
        quantizes = (own.options.weights or own.options.activations) is not None and own.find(DenoiserAlone) is None
        stages = encoder_stages(part) if quantizes else ()
        return Plan(part, (*encoder_rules(part), *family.RULES), own, stages)
    return Plan(part, schedulers.RULES, own) if is_scheduler(part) else pipeline.pipeline_plan(part, own)


def encoder_rules(part: nn.Module) -> tuple[Rule, ...]:
    """For a model of transformers."""
    if not comes_from(type(part), "transformers"):
        return ()
    from accel.encoders.rule import match_encoder
    from accel.fusion.patch_embedding import match_patch_embedding
    from accel.seq2seq.rule import match_seq2seq

    encoder = Rule("encoder", partial(match_encoder, root=part))
    return Rule("encoder-decoder", match_seq2seq), encoder, Rule("patch embedding", match_patch_embedding)


def encoder_stages(part: nn.Module) -> tuple[Stage, ...]:
    """What comes before the rules for a model of transformers that encodes, whose weights are quantized."""
    from accel.encoders.inputs import encoder_stacks
    from accel.llm.stages import quantize, round_activations

    stacks = encoder_stacks(part)
    return (round_activations, partial(quantize, stacks=stacks)) if stacks else ()


def leave_stock(model: Any, context: Context) -> StageResult:
    """The one stage of a model in which nothing can be replaced: it says why."""
    reason = stays_stock(model)
    if context.options.strict:
        raise SkippedSite(f"strict=True: {type(model).__name__}: {reason}")
    return StageResult(report=lambda: StageReport([Row("", "model", "skipped", str(reason))]))


def takes_weights(part: object) -> bool:
    """Whether `Options.weights` says something about part."""
    return is_language_model(part) or _denoises(part) or (isinstance(part, nn.Module) and bool(encoder_stages(part)))


def quantized_among(parts: Mapping[str, object], weights: str) -> set[str]:
    """The names of those that this value of `Options.weights` is about: beside a denoiser no encoders. Raises
    ValueError where a denoiser does not take it.
    """
    denoisers = {name: part for name, part in parts.items() if isinstance(part, nn.Module) and _denoises(part)}
    if denoisers:
        from accel.diffusion.stages import denoiser_scheme

        for part in denoisers.values():
            denoiser_scheme(part, weights)
    takes = is_language_model if denoisers else takes_weights
    return {*denoisers, *(name for name, part in parts.items() if takes(part))}


def keeps_keys(part: object) -> bool:
    """Whether `Options.kv_cache` says something about part."""
    return is_language_model(part) or is_seq2seq(part)


def divides(part: object) -> bool:
    """Whether `Options.parallel` says something about part."""
    return not is_language_model(part) and (_denoises(part) or hasattr(part, "tiled_decode"))


def _denoises(part: object) -> bool:
    from accel.diffusion.linears import denoises

    return denoises(part)


def example_of(obj: object) -> dict:
    """Keyword arguments of a denoiser's or text-to-image pipeline's call. Raises ValueError or TypeError for others."""
    from accel.diffusion.inputs import denoiser_inputs, example_call

    return denoiser_inputs(obj) if isinstance(obj, nn.Module) else example_call(obj)
