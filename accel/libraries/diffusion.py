"""What diffusers keeps on models and schedulers, and has for all of them. It is not imported before it is needed."""

import sys
from typing import Any

import torch

STEP = "_step_index"  # of a scheduler: how many of its timesteps have passed
CLASS = "_class_name"  # of a saved model, in its config.json
UNEVEN = ("ulysses_anything", "ring_anything")  # settings under which ranks hold sequences of different lengths


def parallel_config(holder: object) -> Any:
    """By what a model, or an attention's processor, is divided among ranks; None where it is whole."""
    return getattr(holder, "_parallel_config", None)


def context_parallel(holder: object) -> Any:
    """The `ContextParallelConfig` by which sequences of this model, or of an attention's processor, are divided."""
    return getattr(parallel_config(holder), "context_parallel_config", None)


def mesh_of(config: Any) -> Any:
    """The ranks of a `ContextParallelConfig`, in one dimension; None where it does not tell them."""
    return getattr(config, "_flattened_mesh", None)


def cache_config(model: object) -> Any:
    """How diffusers' own step cache is enabled on a model; None where it is not."""
    return getattr(model, "_cache_config", None)


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
