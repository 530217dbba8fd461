"""Models whose short prompts are filled up to the lengths of graphs, run eagerly on a CPU."""

import torch

from accel.llm.generation.prefill import Prompts
from support.llm import optimized_models
from support.llm.calls import new_cache
from support.llm.families import prompt


class Eager:
    """Takes the place of the graphs: runs what would be captured, on buffers of its own."""

    def __init__(self):
        self.shapes = []

    def __call__(self, eager, args, kwargs, variant=(), without_graph=None):
        self.shapes.append((tuple(args[0].shape[:2]), variant))
        return eager(*(each if each is None else each.clone() for each in args), **kwargs)


class Anywhere(Prompts):
    """On a CPU too."""

    @staticmethod
    def captures(tokens):
        return True


def new_pair(name: str, **changes):
    """(optimized, and every short prompt of it filled up; stock)."""
    ours, stock = optimized_models.pair(name, changes=tuple(changes.items()))
    return filled(ours), stock


def filled(ours):
    """An optimized model, every short prompt of it filled up from now on."""
    prompts = vars(ours)["forward"].prompts
    if prompts is not None:
        vars(ours)["forward"].prompts = Anywhere(Eager(), prompts.most)
    return ours


def shapes(model) -> list:
    """((rows, tokens), variant) of every prompt that was filled up."""
    prompts = vars(model)["forward"].prompts
    return [] if prompts is None else prompts.runner.shapes


def talk(model, ids, mask=None, steps: int = 4, **given) -> dict:
    """Logits of a prompt's last token and of given words after it, and what the cache holds in the end."""
    cache, found = new_cache(model), {}
    if mask is not None:
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    output = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
    found["prompt"] = output.logits
    for step in range(steps):
        more = {}
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            more = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        output = model(prompt(len(ids), 1, 40 + step), past_key_values=cache, logits_to_keep=1, **more)
        found[f"step {step}"] = output.logits
    found["length"] = torch.tensor(cache.get_seq_length())
    return found
