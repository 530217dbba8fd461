"""Texts as a model is measured and calibrated on: windows that each begin anew, and the perplexity of their tokens."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.study import ROOT

HELD_OUT = ROOT / "examples" / "models" / "tiny-lm" / "held_out.txt"
# The second chapter of each novel, which models are shown.
CALIBRATION = ROOT / "tests" / "support" / "llm" / "training_text.txt"
WINDOW = 512
LEFT_OUT = -100
ROWS = 16  # windows of one call


def chapters(path: Path) -> list[str]:
    return path.read_text().split("\n\n")


def windows(tokenizer, texts: list[str]) -> Tensor:
    """(windows, 1 + WINDOW) tokens, the first of each the one that texts begin with; LEFT_OUT behind the end of a text.

    Windows of one text do not overlap; they hold all of its tokens.
    """
    rows = []
    for text in texts:
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        rows += [F.pad(row, (0, WINDOW - len(row)), value=LEFT_OUT) for row in tokens.split(WINDOW)]
    return F.pad(torch.stack(rows), (1, 0), value=tokenizer.bos_token_id)


def calibration(tokenizer, count: int) -> list[dict[str, Tensor]]:
    """So many full windows, (1, WINDOW) each, one text after the other: arguments of a model's forward."""
    of_each = [rows[(rows != LEFT_OUT).all(1)] for rows in (windows(tokenizer, [t]) for t in chapters(CALIBRATION))]
    in_turn = [rows[n, :-1] for n in range(max(map(len, of_each))) for rows in of_each if n < len(rows)]
    if len(in_turn) < count:
        raise ValueError(f"{CALIBRATION.name} has {len(in_turn)} full windows of {WINDOW} tokens, not {count}")
    return [{"input_ids": row[None]} for row in in_turn[:count]]


@torch.no_grad()
def perplexity(model: nn.Module, rows: Tensor) -> float:
    """exp of the mean loss of every token, with the model's own cache as `forward` makes it. rows: see `windows`."""
    loss = count = 0
    for some in rows.to(next(model.parameters()).device).split(ROWS):
        targets = some[:, 1:]
        # What stands behind the end of a text is read by no token of it.
        logits = model(some[:, :-1].clamp_min(0)).logits
        loss += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").item()
        count += int((targets != LEFT_OUT).sum())
    return math.exp(loss / count)
