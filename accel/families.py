"""Which family something is of, language models or diffusion, and what follows: its plan, its options, an example call.

Families are imported when something of theirs is at hand, so that importing accel stays light.
"""

import sys

from torch import nn

from accel.patching.context import Context
from accel.planning.objects import is_scheduler
from accel.planning.plan import Plan


def plan_for(part: object, context: Context) -> Plan:
    """How a model, a scheduler or a pipeline becomes fast. context: of all that is optimized together."""
    own = context.for_model()
    if isinstance(part, nn.Module) and is_language_model(part):
        from accel.llm.stages import language_plan

        return language_plan(part, own)

    from accel.diffusion import family, pipeline, schedulers
    from accel.diffusion.linears import denoises

    if isinstance(part, nn.Module):
        own.graph_paths = family.graph_paths(part)
        if (context.options.weights or context.options.activations) is not None and denoises(part):
            from accel.diffusion.stages import denoiser_plan

            return denoiser_plan(part, own)
        return Plan(part, family.RULES, own)
    return Plan(part, schedulers.RULES, own) if is_scheduler(part) else pipeline.pipeline_plan(part, own)


def is_language_model(part: object) -> bool:
    """Whether part is a causal language model, which only transformers' are."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(part, transformers.PreTrainedModel):
        return False
    from accel.llm import family

    return family.is_causal_lm(part)


def takes_weights(part: object) -> bool:
    """Whether `Options.weights` says something about part."""
    if is_language_model(part):
        return True

    from accel.diffusion.linears import denoises

    return denoises(part)


def divides(part: object) -> bool:
    """Whether `Options.parallel` says something about part."""
    if is_language_model(part):
        return False

    from accel.diffusion.linears import denoises

    return denoises(part) or hasattr(part, "tiled_decode")


def example_of(obj: object) -> dict:
    """Keyword arguments of a call, of a denoiser or a text-to-image pipeline. Raises ValueError or TypeError where none
    is known.
    """
    from accel.diffusion.inputs import denoiser_inputs, example_call

    return denoiser_inputs(obj) if isinstance(obj, nn.Module) else example_call(obj)
