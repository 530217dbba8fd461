"""Prompts on which no router of a model finds its last choice and the next expert nearly equal."""

import itertools

import torch
from torch import nn
from torch.nn.functional import linear

from support.llm.families import prompt
from support.llm.gpu import talk

LEAST = 1e-4  # of the largest logit: a hundred times what the order of sums moves logits in float32


def clear_seeds(model: nn.Module, rows: int, length: int, count: int) -> list[int]:
    """The first seeds of prompts whose smallest gap is above LEAST; model: stock, in float32, on the CPU."""
    found = (seed for seed in itertools.count() if smallest_gap(model, prompt(rows, length, seed)) > LEAST)
    return list(itertools.islice(found, count))


@torch.no_grad()
def smallest_gap(model: nn.Module, ids: torch.Tensor) -> float:
    """Between the last expert chosen and the best one that is not, by the largest logit of the token.

    Of all tokens, routers and steps of a talk. Raises LookupError for a model in which nothing chooses.
    """
    gaps: list[float] = []

    def look(module: nn.Module, args: tuple, output: object) -> None:
        index = [one for one in output if one.dtype == torch.int64] if isinstance(output, tuple) else []
        if index:
            gaps.append(_gap(linear(args[0], module.weight, getattr(module, "bias", None)), index[0].shape[-1]))

    choosing = [module for module in model.modules() if isinstance(getattr(module, "weight", None), nn.Parameter)]
    handles = [module.register_forward_hook(look) for module in choosing]
    try:
        talk(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    if not gaps:
        raise LookupError("nothing in this model chooses")
    return min(gaps)


def _gap(logits: torch.Tensor, chosen: int) -> float:
    best = logits.flatten(0, -2).sort(descending=True).values
    gaps = (best[:, chosen - 1] - best[:, chosen]) / best.abs().amax(-1)
    return gaps.min().item()
