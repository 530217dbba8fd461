"""Calibration data as batches of token numbers: from texts, rows of a data set, or what a loader gives."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from accel.patching.structure import placement

ROWS = 128  # texts, or rows of batches: more than calibrated methods gain from
LENGTH = 2048  # tokens of a text
TOGETHER = 8192  # tokens of a call, of rows that are as long: a small one is over before the next is launched
KEPT = ("input_ids", "attention_mask")
VALID = "give a list of texts, a data set with a column 'text' or 'input_ids', or batches of 'input_ids'"


def batches(model: PreTrainedModel, calibration: object, tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Of the first 128 rows, `input_ids` int64 (rows, tokens) and an `attention_mask` where there is padding, on the
    device of the model. A text is one row of 2048 tokens at most, fewer where the model has fewer positions; rows that
    follow each other and are as long come together.

    Raises TypeError for data of another kind, ValueError for texts without a tokenizer, for none, and for tokens
    outside the vocabulary.
    """
    if isinstance(calibration, str | bytes | Mapping) or not isinstance(calibration, Iterable):
        raise TypeError(f"calibration is a {type(calibration).__name__}; {VALID}")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LENGTH
    words = model.get_input_embeddings().weight.shape[0]
    device, _ = placement(model)
    found, left = [], ROWS
    for number, batch in enumerate(_tokenized(calibration, tokenizer, min(LENGTH, positions))):
        batch = {name: tensor[:left] for name, tensor in batch.items()}
        ids = batch["input_ids"]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < words:
            raise ValueError(f"calibration: item {number} holds tokens outside the vocabulary of {words}")
        if ids.numel():
            found.append({name: tensor.to(device) for name, tensor in batch.items()})
            left -= len(ids)
        if left <= 0:
            break
    if not found:
        raise ValueError(f"calibration holds no tokens; {VALID}")
    return _together(found)


def _together(found: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    calls: list[list[torch.Tensor] | dict] = []
    for batch in found:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            calls.append(batch)
            continue
        last = calls[-1] if calls and isinstance(calls[-1], list) else None
        if last and last[0].shape[1] == ids.shape[1] and sum(map(len, (*last, ids))) * ids.shape[1] <= TOGETHER:
            last.append(ids)
        else:
            calls.append([ids])
    return [{"input_ids": torch.cat(call)} if isinstance(call, list) else call for call in calls]


def windows(text: str, tokenizer: Any, tokens: int) -> list[torch.Tensor]:
    """A long text as its first 128 rows (1, tokens); a shorter one where that is all there is."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : tokens * ROWS]
    whole = ids.shape[1] // tokens * tokens
    return list(ids[:, : whole or None].split(tokens, dim=1))


def _tokenized(items: Iterable, tokenizer: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    for number, item in enumerate(items):
        if isinstance(item, Mapping) and "input_ids" not in item:
            if not isinstance(item.get("text"), str):
                raise TypeError(f"calibration: item {number} holds {', '.join(map(repr, item)) or 'nothing'}; {VALID}")
            item = item["text"]
        if isinstance(item, str):
            if tokenizer is None:
                raise ValueError(
                    "calibration holds texts: give their tokenizer too, quantize(..., tokenizer=tokenizer)"
                )
            item = tokenizer(item, return_tensors="pt", truncation=True, max_length=length)
        elif not isinstance(item, Mapping):
            item = {"input_ids": item}
        yield {name: _rows(item[name], name, number) for name in KEPT if item.get(name) is not None}


def _rows(value: object, name: str, number: int) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = None
    if tensor is not None and not tensor.numel():
        tensor = tensor.long()
    if tensor is None or tensor.is_floating_point() or tensor.is_complex() or tensor.dim() not in (1, 2):
        raise TypeError(f"calibration: {name} of item {number} is no (rows, tokens) of whole numbers; {VALID}")
    return (tensor if tensor.dim() == 2 else tensor[None]).long()
