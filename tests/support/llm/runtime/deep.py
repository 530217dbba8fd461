"""Models whose layers amplify what is rounded before them."""

import torch
from torch import nn

from support.llm.families import make


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0, **config) -> nn.Module:
    """spread: what matrices of layers are multiplied by. The larger they are, the more do layers amplify rounding."""
    model = make(family, **config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not name.startswith(("model.embed", "transformer.w", "lm_head")):
            weight.data *= spread
    return model.to(dtype)
