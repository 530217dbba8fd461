"""The output head: the largest matrix of a step, read once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.llm.runtime.linear import weights
from accel.patching.context import Context
from accel.patching.fast_forward import FastForward
from accel.patching.rule import Match
from accel.patching.site import Site


@dataclass(frozen=True)
class OutputHead:
    """The module by which a model makes logits, which its sites share."""

    module: nn.Module


class HeadForward(FastForward):
    """A linear layer over the last hidden states."""

    def unfit(self, input: Any) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight = self.module.weight
        if type(weight) is not nn.Parameter or weight.dtype != input.dtype:
            return "weights of another kind or dtype"
        return None

    def fast(self, input: torch.Tensor) -> Any:
        return self.kernels.fused_linear(input.contiguous(), self.module.weight, self.module.bias)


def match_head(site: Site, context: Context) -> Match | None:
    """The model's own output embeddings, which the rule for the whole model has named, exactly nn.Linear."""
    named = context.find(OutputHead)
    head = None if named is None else named.module
    if head is None or site.module is not head or type(head) is not nn.Linear or weights(head) is None:
        return None
    return Match(HeadForward(site.module, site.path, context.kernels, context.ledger))
