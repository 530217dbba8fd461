"""What diffusers keeps on models and schedulers, and has for all of them. It is not imported before it is needed."""

import sys
from typing import Any

import torch

STEP = "_step_index"  # of a scheduler: how many of its timesteps have passed
CLASS = "_class_name"  # of a saved model, in its config.json
DIVIDED, CACHED_STEPS = "_parallel_config", "_cache_config"  # on a model: how ranks divide it; its own step cache
MESH = "_flattened_mesh"  # of a configuration of context parallelism: its ranks, in one dimension
UNEVEN = ("ulysses_anything", "ring_anything")  # settings under which ranks hold sequences of different lengths


def context_parallel(holder: object) -> Any:
    """The configuration by which sequences of this model, or of an attention's processor, are divided."""
    return getattr(getattr(holder, DIVIDED, None), "context_parallel_config", None)


def active_backend() -> object:
    """The attention backend for processors without their own: by `attention_backend(...)` or the environment."""
    return getattr(_backends(), "_active_backend", None)


def attention_backends() -> dict:
    """Functions by the names of attention backends."""
    found = getattr(_backends(), "_backends", None)
    return found if isinstance(found, dict) else {}


def _backends() -> Any:
    return getattr(sys.modules.get("diffusers.models.attention_dispatch"), "_AttentionBackendRegistry", None)


def file_of_pipelines(name: str) -> Any:
    """Where diffusers has pipelines of a kind and their own models; None for a name that it does not know."""
    import diffusers

    return getattr(diffusers.pipelines, name, None)


def image_output(sample: torch.Tensor) -> Any:
    """What a stack of transformer blocks over images returns."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
