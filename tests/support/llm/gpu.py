"""Pairs of models on a GPU, a talk with them, and which of their graphs are replayed."""

import copy
import inspect

import pytest
import torch
from transformers import DynamicCache

import accel
from support.llm.families import BY_NAME, available, make, prompt


def new_pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """(optimized, stock)."""
    if not available(BY_NAME[name].kind):
        pytest.skip(f"this transformers has no {BY_NAME[name].kind}")
    stock = make(name, **changes).to("cuda", dtype)
    return accel.optimize(copy.deepcopy(stock), graphs=True), stock


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
