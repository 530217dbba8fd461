"""The output head: the largest matrix of a step, read once."""

import torch

from accel.forward import FastForward
from accel.llm.linear import weights
from accel.rule import Match

HEAD = "output head"  # the name under which the sites of a model share it


class HeadForward(FastForward):
    """A linear layer over the last hidden states."""

    def unfit(self, input) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight = self.module.weight
        if type(weight) is not torch.nn.Parameter or weight.dtype != input.dtype:
            return "weights of another kind or dtype"
        return None

    def fast(self, input):
        return self.kernels.projection(input.contiguous(), self.module.weight, self.module.bias)


def match_head(site, context) -> Match | None:
    """The model's own output embeddings, which the rule for the whole model has named, exactly nn.Linear."""
    head = context.shared.get(HEAD)
    if head is None or site.module is not head or type(head) is not torch.nn.Linear or weights(head) is None:
        return None
    return Match(HeadForward(site.module, site.path, context.kernels, context.ledger))
