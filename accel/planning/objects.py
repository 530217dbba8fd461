"""The models and schedulers inside what a user hands to accel."""

import sys
from typing import Any

from torch import nn


def models_in(obj: object) -> dict[str, nn.Module] | None:
    """The models in a pipeline by component name, or {"": model}; None for anything else.

    Pipelines and models are told by the base classes of diffusers and transformers, looked up only where the caller
    has imported them already.
    """
    diffusers, transformers = sys.modules.get("diffusers"), sys.modules.get("transformers")
    if diffusers is not None:
        if isinstance(obj, diffusers.DiffusionPipeline):
            models = ((name, uncompiled(part)) for name, part in obj.components.items())
            return {name: part for name, part in models if isinstance(part, nn.Module)}
        if isinstance(obj, diffusers.ModelMixin):
            return {"": obj}
    if transformers is not None:
        if isinstance(obj, transformers.PreTrainedModel):
            return {"": obj}
        if isinstance(obj, transformers.Pipeline) and isinstance(obj.model, nn.Module):
            return {"model": obj.model}
    return None


def uncompiled(part: object) -> object:
    """The module inside what torch.compile returned, which users put in its place; any other part as it is."""
    return part._modules.get("_orig_mod", part) if isinstance(part, nn.Module) else part


def is_scheduler(obj: object) -> bool:
    """Whether obj is made like a scheduler of diffusers: it sets timesteps, steps through them, and has a config."""
    return all(hasattr(obj, name) for name in ("set_timesteps", "step", "timesteps", "config"))


def schedulers_in(pipe: Any) -> dict[str, object]:
    """The schedulers of a diffusers pipeline by component name."""
    return {name: part for name, part in pipe.components.items() if is_scheduler(part)}


def parts_in(obj: object) -> dict[str, object]:
    """What of obj may be patched besides its models: a pipeline's schedulers, and the pipeline itself as ""."""
    diffusers = sys.modules.get("diffusers")
    if diffusers is None or not isinstance(obj, diffusers.DiffusionPipeline):
        return {}
    return schedulers_in(obj) | {"": obj}
