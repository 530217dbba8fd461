"""Random weights of tiny models that are large enough for a mistake to show."""

import torch
from torch import nn


def randomize(module: nn.Module, weight: torch.Tensor, generator: torch.Generator, words: float) -> None:
    """Weights of norms and biases that are not ones and zeros, matrices that keep the size of what they are given.

    Transformers' own are so small that attention is a mean over all positions, and a mistake in it hardly shows.
    """
    noise = torch.randn(weight.shape, generator=generator)
    if weight.dim() < 2:
        weight += 0.2 * noise
    elif isinstance(module, nn.Embedding):
        weight.copy_(words * noise)
    else:
        inputs = weight.shape[-2] if type(module).__name__ == "Conv1D" else weight.shape[-1]
        weight.copy_(1.6 * noise * inputs**-0.5)
