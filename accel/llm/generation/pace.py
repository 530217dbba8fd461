"""How long a token takes, fused and stock: timed for a moment, in turns, when a model is optimized."""

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from accel.libraries.cache import cache_given, cache_of
from accel.llm.recording.implementation import unpaged
from accel.llm.recording.inputs import most_configured
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import example_ids, model_side_effects, resting
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import as_written

PROMPT = 4  # tokens before those that are timed
WARM = 1  # token of each kind, for which a GPU's kernels are compiled
MOST = 12  # tokens timed of each kind, of which the quickest counts
SECONDS = 0.1  # after which no more are begun; three of each kind are timed anyway


def pace(model: nn.Module, log: FallbackLog) -> tuple[float, float]:
    """Seconds a token, fused and stock: the least of some decode steps, each kind with a cache of its own.

    model: patched, its forwards sharing this log, which counts none of these calls. Raises what the model raises,
    and NotUnderstood for a model whose calls somebody would notice.
    """
    reason = model_side_effects(model)
    if reason is not None:
        raise NotUnderstood(reason)
    most = min(PROMPT + WARM + MOST, most_configured(model) or PROMPT + WARM + MOST)
    ids = example_ids(model, most, seed=2)[:1]
    caches: dict[bool, Any] = {}
    times: dict[bool, list[float]] = {False: [], True: []}

    def step(stock: bool, start: int, end: int) -> None:
        with ExitStack() as inside:
            for context in (as_written(), unpaged(model)) if stock else ():
                inside.enter_context(context)
            start_time = _now(ids.device)
            cache = caches.get(stock)
            given = cache_given(type(model).forward, cache)
            output = model.forward(input_ids=ids[:, start:end], use_cache=True, return_dict=True, **given)
            times[stock].append(_now(ids.device) - start_time)
        caches[stock] = cache_of(output)

    before, log.stock_on_cpu = log.stock_on_cpu, False
    try:
        with resting(model):
            for stock in times:
                step(stock, 0, PROMPT)
            until = time.perf_counter() + SECONDS
            for at in range(PROMPT, most):
                for stock in sorted(times, reverse=bool(at % 2)):  # who comes first takes turns too
                    step(stock, at, at + 1)
                if at >= PROMPT + WARM + 2 and time.perf_counter() > until:
                    break
    finally:
        log.stock_on_cpu = before
        log.clear()
    return min(times[False][1 + WARM :]), min(times[True][1 + WARM :])


def _now(device: torch.device) -> float:
    """The time, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
