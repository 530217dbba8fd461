"""Pairs of models on a GPU, a talk with them, and which of their graphs are replayed."""

import copy
import inspect

import pytest
import torch
from transformers import DynamicCache

import accel
from accel.bench.llm.models import spread
from accel.llm.pipeline.forward import SpreadForward
from support.llm.families import BY_NAME, available, layers, make, prompt

CARDS = [cards for cards in (2, 4) if torch.cuda.device_count() >= cards]
DEEP = ("llama", "gpt-neox", "mixtral", "qwen3", "phi3")  # spread with four layers; others with two


def new_pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), graphs=True), stock


def pair_over(cards: int, name: str = "llama", dtype: torch.dtype = torch.float32, tied: bool = False, **options):
    """(optimized, stock), both spread over so many cards, or as many as there are layers. tied: the head, to the
    embeddings, on whose card it then is.
    """
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    changes = {"num_hidden_layers": 4} if name in DEEP else {}
    one = make(name, dtype, **changes, **({"tie_word_embeddings": True} if tied else {}))
    cards = min(cards, len(layers(one)))
    stock, ours = (spread(copy.deepcopy(one), cards) for _ in range(2))
    return accel.optimize(ours, graphs=True, **options), stock


def forward_over(model) -> SpreadForward:
    """That of a model over several cards."""
    found = vars(model)["forward"]
    assert type(found) is SpreadForward, accel.report(model)
    return found


def stretches_replayed(model) -> set[str]:
    return {row["path"] for row in replayed(model)}


def on_gpu(*tensors):
    return tuple(None if tensor is None else tensor.cuda() for tensor in tensors)


def replayed(model) -> list[dict]:
    return [row for row in accel.report(model).graphs if row["status"] == "graph"]


def decode_graphs(model) -> list[dict]:
    """Rows of the report for decode steps that are replayed."""
    return [row for row in replayed(model) if "prompt" not in row["inputs"].split(", ")]


def prefill_graphs(model) -> list[dict]:
    """Rows of the report for prompts that are replayed."""
    return [row for row in replayed(model) if "prompt" in row["inputs"].split(", ")]


def talk(model, ids, mask=None, steps: int = 3) -> dict:
    """Logits of a prompt's last token and of given words after it."""
    cache, found = DynamicCache(config=model.config), {}
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    mask = torch.ones_like(ids) if mask is None else mask
    for step in range(steps + 1):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given = {"position_ids": positions} if takes_positions else {}
        output = model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1, **given)
        found[f"{step}"] = output.logits
        ids = prompt(len(ids), 1, 40 + step).to(ids.device)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    return found
