"""How long a token takes, fused and stock: timed for a moment, in turns, when a model is optimized."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from accel.cuda_graphs.pays import in_turns
from accel.libraries.cache import cache_given, cache_of
from accel.llm.recording.implementation import unpaged
from accel.llm.recording.inputs import example_ids, most_configured
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.resting import Unwritten, model_side_effects, resting
from accel.patching.fallback_log import FallbackLog
from accel.patching.fast_forward import as_written

PROMPT = 4  # tokens before those that are timed
WARM = 1  # token of each kind, for which a GPU's kernels are compiled
MOST = 12  # tokens timed of each kind, of which the quickest counts
SECONDS = 0.1  # after which no more are begun


def pace(model: nn.Module, log: FallbackLog) -> tuple[float, float]:
    """Seconds a token, fused and stock: the least of some decode steps, each kind with a cache of its own.

    model: patched, its forwards sharing this log, which counts none of these calls. Raises what the model raises,
    and NotUnderstood for a model whose calls somebody would notice.
    """
    if (reason := model_side_effects(model)) is not None:
        raise NotUnderstood(reason)
    most = min(PROMPT + WARM + MOST, most_configured(model) or PROMPT + WARM + MOST)
    ids = example_ids(model, most, seed=2)[:1]
    caches: dict[bool, Any] = {}
    lengths = {False: 0, True: 0}

    def step(stock: bool, tokens: int = 1) -> None:
        start, lengths[stock] = lengths[stock], lengths[stock] + tokens
        given = cache_given(type(model).forward, caches.get(stock))
        new = ids[:, start : start + tokens]
        caches[stock] = cache_of(model.forward(input_ids=new, use_cache=True, return_dict=True, **given))

    @contextmanager
    def as_stock() -> Iterator[None]:
        with as_written(), unpaged(model):
            yield

    before, log.stock_on_cpu = log.stock_on_cpu, False
    try:
        with resting(model):
            around = (nullcontext, as_stock)
            for stock in lengths:
                with around[stock](), Unwritten(model):
                    step(stock, PROMPT)
            steps, rounds = [partial(step, stock) for stock in lengths], most - PROMPT - WARM
            found = in_turns(steps, ids.device, WARM, rounds, calls=1, seconds=SECONDS, around=around)
    finally:
        log.stock_on_cpu = before
        log.clear()
    return found[False].wall, found[True].wall
