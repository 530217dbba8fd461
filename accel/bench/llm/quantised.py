"""Variants with quantised weights, beside stock and plain accel: what they cost to make, and what they lose."""

import copy
import statistics

import torch
from torch import nn

import accel
from accel.agreement import distributions
from accel.bench.llm.models import prompt
from accel.bench.llm.turns import Variant
from accel.bench.timing import seconds

PROMPT = (2, 256)  # rows and tokens that the loss is told for


@torch.no_grad()
def variant(stock: nn.Module, scheme: str, device: torch.device) -> tuple[Variant, dict]:
    """A copy of the stock model under accel.optimize(weights=scheme), and its row of the result.

    quantise_s: of that call, kernels compiled for it included; mb: MiB of the quantised weights alone; kl and top1:
    against stock, on random tokens. Raises ValueError where nothing was quantised.
    """
    model = copy.deepcopy(stock)
    taken = seconds(lambda: accel.optimize(model, weights=scheme, keep_original=False), device)
    rows = accel.report(model).weights
    if not rows:
        raise ValueError(f"weights={scheme!r}: no linear layer was quantised")
    before, after = (sum(row[key] for row in rows) for key in ("bytes_before", "bytes_after"))
    inputs = prompt(stock, *PROMPT)
    kl, _, top1 = distributions(*(one(**inputs).logits.flatten(0, 1) for one in (stock, model)))
    told = {
        "quantise_s": round(taken, 3),
        "mb": round(after / 2**20, 3),
        "mb_before": round(before / 2**20, 3),
        "sqnr_db": round(statistics.mean(row["sqnr_db"] for row in rows), 2),
        "kl": kl,
        "top1": top1,
    }
    return Variant(f"accel {scheme}", model, saved=before - after), told
