"""Example inputs for causal language models, from their configuration and signature: for verify and benchmarks."""

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel.patching.structure import placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, TOKENS = 2, 48
FEW = 7  # tokens enough to see what a model computes
LEAST = 4  # tokens of a prompt, some of which are padding
SPARE_ROWS = 8  # of a table of positions, some of which may belong to none
KNOWN = {"input_ids", "inputs_embeds", "attention_mask", "token_type_ids"}  # what forward and generate() both take


def causal(model: object) -> bool:
    """Whether model writes on from a text: generate() on tokens, one stack of layers."""
    if not isinstance(model, nn.Module) or not hasattr(model, "generate"):
        return False
    generates = getattr(model, "can_generate", None)
    if generates is None or not generates() or getattr(model.config, "is_encoder_decoder", False):
        return False
    return "input_ids" in inspect.signature(model.forward).parameters


def example_inputs(
    model: "PreTrainedModel", rows: int = ROWS, tokens: int = TOKENS, *, padded: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random prompts for a causal language model: input_ids and attention_mask, (rows, tokens) int64, on its device.

    padded: rows have lengths of their own, filled up on the left, the first row full. The values are the same on every
    device. A model that takes no attention mask gets prompts of one length.
    """
    device = placement(model)[0]
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or tokens
    tokens = min(tokens, most)
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(_vocabulary(model), (rows, tokens), generator=generator)
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return {"input_ids": ids.to(device)}
    mask = torch.ones_like(ids)
    if padded:
        missing = torch.arange(rows) % 3 * (tokens // 3)
        mask = (torch.arange(tokens) >= missing[:, None]).long()
        ids = ids.masked_fill(mask == 0, _padding(model))
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def table_of_positions(model: "PreTrainedModel") -> int | None:
    """Positions there are, where the model has a table of them, beyond which a GPU would fail for good; else None."""
    most = _most_positions(model)
    tensors = (*model.parameters(), *model.buffers())
    tables = most and any(t.dim() > 1 and most <= t.shape[0] <= most + SPARE_ROWS for t in tensors)
    return most if tables else None


def within_positions(model: "PreTrainedModel", lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of a prompt and of steps after it: these, or fewer where the model has fewer positions, or 0 in a prompt
    where it has too few.
    """
    most, (_, *steps) = _most_positions(model), lengths
    if not most or sum(lengths) <= most or table_of_positions(model) is None:
        return lengths
    if most < LEAST + sum(steps):
        steps = [1 for _ in steps]
    prompt = most - sum(steps)
    return prompt if prompt >= LEAST else 0, *steps


def few(model: "PreTrainedModel") -> int:
    """FEW, or as many as the model has positions for."""
    most = _most_positions(model)
    return most if most and most < FEW and table_of_positions(model) else FEW


def _most_positions(model: "PreTrainedModel") -> int | None:
    """What the configuration says."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _vocabulary(model: "PreTrainedModel") -> int:
    """Tokens that have an embedding and a logit."""
    return min(model.config.get_text_config().vocab_size, model.get_input_embeddings().weight.shape[0])


def _padding(model: "PreTrainedModel") -> int:
    token = getattr(model.generation_config, "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else 0
