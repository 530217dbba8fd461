"""Tokens a second of a language model within budgets of memory, beside all of it on the card.

Tokens are drawn, and what is embedded is as large as what layers add: else tokens of random weights, and the experts
that they choose, are soon the same ones. The text that is timed is another than those before it.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import accel
from accel.bench.llm.models import build, build_by_layers, config_of, from_config, prompt
from accel.bench.memory import device_bytes, device_peak, release
from accel.bench.timing import Clock, synchronize
from accel.errors import Refused
from accel.offload.blocks import nbytes
from accel.offload.call_hooks import streamed_model

PROMPT, TOKENS, WARM = 128, 128, 3  # of a text, that are timed, texts before
LARGE = 0.8  # of the free memory: what takes more in 16 bits is made in fewer
EMBEDDED = 50  # times what a model is made with
Figures = Iterator[tuple[str, dict]]  # of a place, as they become known


@torch.no_grad()
def measure_text(name: str, device: torch.device, budgets: list[str], weights: str | None = "int4") -> Figures:
    """Tokens a second of one text, and seconds of its prompt, on the card and within each budget, as they are known.

    error: the share of its tokens that are others than the optimized model writes that is on the card as a whole. Peaks
    are of the whole device, above what it had in use before the model. Raises KeyError for an unknown name.
    """
    release(device)
    before = device_bytes(device)
    paper = from_config(config_of(name), torch.device("meta"), torch.bfloat16)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    large = weights is not None and nbytes(paper) > LARGE * free
    model = build_by_layers(name, device, str(weights)).to(device) if large else build(name, device, torch.bfloat16)
    weights = None if large else weights  # which they are in already
    given = prompt(model, 1, PROMPT)
    model.get_input_embeddings().weight.mul_(EMBEDDED)
    accel.optimize(model, weights=weights, keep_original=False)
    row, wanted = _timed(model, given, device, before)
    yield "accel, on the card", row
    options = {"weights": weights, "keep_original": False}
    for key, row, got in within_each(model, budgets, options, lambda: _timed(model, given, device, before)):
        yield key, row if got is None else row | {"error": float((got != wanted).float().mean())}


def within_each(
    model: Any, budgets: list[str], options: dict, timed: Callable[[], tuple[dict, torch.Tensor]]
) -> Iterator[tuple[str, dict, torch.Tensor | None]]:
    """For each budget its name, and what `timed` measures of the model and what it returns; or why not."""
    for budget in budgets:
        clock = Clock()
        try:
            accel.optimize(model, memory=budget, **options)
        except Refused as refused:
            yield f"accel, {budget}", {"failed": str(refused)}, None
            continue
        ready = clock.taken()
        row, got = timed()
        held = streamed_model(model)
        assert held is not None
        row |= {"ready_s": round(ready, 1), "streamed_gb": round(held.sizes.moved(held.streamed or ()) / 1e9, 2)}
        if held.hot is not None:
            row |= {"experts": held.copies, "read_there": held.hot.share()}
        yield f"accel, {budget}", row, got


def _timed(model: Any, given: dict, device: torch.device, before: int) -> tuple[dict, torch.Tensor]:
    def run(tokens: int, seed: int = 0) -> tuple[torch.Tensor, float]:
        synchronize(device)
        started = time.perf_counter()
        torch.manual_seed(seed)
        result = model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, top_k=0)
        synchronize(device)
        return result, time.perf_counter() - started

    for turn in range(WARM):
        run(TOKENS, 1 + turn)
    release(device)
    with device_peak(device) as peak:
        first = min(run(1)[1] for _ in range(2))
        result, whole = run(1 + TOKENS)
    row = {"tokens_s": round(TOKENS / (whole - first), 1), "prompt_s": round(first, 3)}
    return row | {"peak_gb": round((peak[0] - before) / 1e9, 2)}, result
