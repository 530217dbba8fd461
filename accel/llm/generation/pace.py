"""How long a token takes on a CPU, fused and stock: timed for a moment, in turns, when a model is optimized."""

import statistics
import time
from contextlib import nullcontext
from typing import Any

from torch import nn

from accel.libraries.cache import cache_given, cache_of
from accel.llm.recording.errors import NotUnderstood
from accel.llm.recording.implementation import unpaged
from accel.llm.recording.inputs import most_configured
from accel.llm.recording.recorder import example_ids, model_side_effects, resting
from accel.patching.ledger import Ledger

PROMPT = 4  # tokens before those that are timed
MOST = 12  # tokens timed of each kind
SECONDS = 0.1  # after which no more are begun; one of each kind is timed anyway


def pace(model: nn.Module, ledger: Ledger) -> tuple[float, float]:
    """Seconds a token, fused and stock: medians of decode steps, each kind with a cache of its own.

    model: patched, its forwards sharing this ledger, which counts none of these calls. Raises what the model raises,
    and NotUnderstood for a model whose calls somebody would notice.
    """
    reason = model_side_effects(model)
    if reason is not None:
        raise NotUnderstood(reason)
    most = min(PROMPT + MOST, most_configured(model) or PROMPT + MOST)
    ids = example_ids(model, most, seed=2)[:1]
    caches: dict[bool, Any] = {}
    times: dict[bool, list[float]] = {False: [], True: []}

    def step(stock: bool, start: int, end: int) -> None:
        ledger.stock_on_cpu = stock
        with unpaged(model) if stock else nullcontext():
            pending = time.perf_counter()
            cache = caches.get(stock)
            given = cache_given(type(model).forward, cache)
            output = model.forward(input_ids=ids[:, start:end], use_cache=True, return_dict=True, **given)
            times[stock].append(time.perf_counter() - pending)
        caches[stock] = cache_of(output)

    before = ledger.stock_on_cpu
    try:
        with resting(model):
            for stock in times:
                step(stock, 0, PROMPT)
            until = time.perf_counter() + SECONDS
            for at in range(PROMPT, most):
                for stock in sorted(times, reverse=bool(at % 2)):  # who comes first takes turns too
                    step(stock, at, at + 1)
                if time.perf_counter() > until:
                    break
    finally:
        ledger.stock_on_cpu = before
        ledger.clear()
    return statistics.median(times[False][1:]), statistics.median(times[True][1:])
