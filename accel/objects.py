"""The models inside what a user hands to accel."""

import sys

from torch import nn


def models_in(obj: object) -> dict[str, nn.Module] | None:
    """The models in a pipeline by component name, or {"": model}; None for anything else.

    Pipelines and models are told by the base classes of diffusers and transformers, looked up only where the caller
    has imported them already.
    """
    diffusers, transformers = sys.modules.get("diffusers"), sys.modules.get("transformers")
    if diffusers is not None:
        if isinstance(obj, diffusers.DiffusionPipeline):
            return {name: part for name, part in obj.components.items() if isinstance(part, nn.Module)}
        if isinstance(obj, diffusers.ModelMixin):
            return {"": obj}
    if transformers is not None:
        if isinstance(obj, transformers.PreTrainedModel):
            return {"": obj}
        if isinstance(obj, transformers.Pipeline) and isinstance(obj.model, nn.Module):
            return {"model": obj.model}
    return None
