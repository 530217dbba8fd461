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
    tokens = min(tokens, most_configured(model) or tokens)
    generator = torch.Generator("cpu").manual_seed(seed)
    known = min(model.config.get_text_config().vocab_size, model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(known, (rows, tokens), generator=generator, device="cpu")
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return {"input_ids": ids.to(device)}
    mask = torch.ones_like(ids)
    if padded:
        missing = torch.arange(rows, device="cpu") % 3 * (tokens // 3)
        mask = (torch.arange(tokens, device="cpu") >= missing[:, None]).long()
        token = getattr(model.generation_config, "pad_token_id", None)
        ids = ids.masked_fill(mask == 0, token if isinstance(token, int) and token >= 0 else 0)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def example_ids(model: "PreTrainedModel", tokens: int, seed: int = 0) -> torch.Tensor:
    """(ROWS, tokens) random token numbers, from a generator of their own."""
    known = getattr(model.config.get_text_config(), "vocab_size", None)  # by which other tables may be shorter
    try:
        words = model.get_input_embeddings().weight.shape[0]
    except NotImplementedError:  # as transformers says that it does not know where they are
        words = known
    words = min(words, known or words)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(words, (ROWS, tokens), generator=generator, device="cpu").to(placement(model)[0])


def within_positions(most: int | None, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of a prompt and of steps after it: these, or fewer where the model has fewer positions, or 0 in a prompt
    where it has too few. most: positions there are, None for any number.
    """
    _, *steps = lengths
    if most is None or sum(lengths) <= most:
        return lengths
    if most < LEAST + sum(steps):
        steps = [1 for _ in steps]
    prompt = most - sum(steps)
    return prompt if prompt >= LEAST else 0, *steps


def few(model: "PreTrainedModel") -> int:
    """FEW, or as many as the model may have positions for."""
    return min(FEW, most_configured(model) or FEW)


def most_configured(model: "PreTrainedModel") -> int | None:
    """Tokens of a text by the configuration: those that a table has positions for, or of the longest text in training;
    None where it does not say. RoBERTa's kind of table has positions up to that of padding that no token has.
    """
    if (most := _positions(model)) is None:
        return None
    # Asked first: weights in fewer bits are made whole where somebody reads them.
    padded = (one for one in model.modules() if isinstance(getattr(one, "padding_idx", None), int))
    tables = (one for one in padded if isinstance(getattr(one, "weight", None), torch.Tensor))
    return max(1, most - max((one.padding_idx + 1 for one in tables if one.weight.shape[:1] == (most,)), default=0))


def _positions(model: "PreTrainedModel") -> int | None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most if isinstance(most, int) and most > 0 else None


def last_positions(model: "PreTrainedModel", ids: torch.Tensor, begin: int | None = None) -> dict[str, torch.Tensor]:
    """The keyword that puts these tokens at late positions; none where the configuration does not name the last.

    They are those from `begin` on; without, the last, and those around a half, a quarter and an eighth, from which on a
    model may do otherwise.
    """
    most = _positions(model)
    if most is None or "position_ids" not in inspect.signature(type(model).forward).parameters:
        return {}
    tokens = ids.shape[1]
    places = sorted({at for part in (1, 2, 4, 8) for at in (most // part - 1, most // part) if 0 <= at < most})
    late = places[-tokens:] if len(places) >= tokens else range(most - tokens, most)
    late = late if begin is None else range(begin, begin + tokens)
    return {"position_ids": torch.tensor(late, device=ids.device).expand(ids.shape)}
