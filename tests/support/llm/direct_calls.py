"""A model called directly, ours and stock."""

import inspect

import torch

from support.llm.outputs import same


def both(pair, call):
    ours, stock = pair
    theirs = call(stock)
    for _ in range(2):
        same(call(ours), theirs)
    return theirs


def shown(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Where a position may see something: what stock gives for one that sees nothing is of no use to anybody."""
    if mask is None:
        return logits
    return torch.where((mask.cumsum(1) > 0)[..., None], logits, 0)


def second(model) -> str:
    """What a model takes as its second argument: most a mask, some a cache before it."""
    return list(inspect.signature(type(model).forward).parameters)[2]
