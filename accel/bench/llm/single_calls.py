"""Calls of one variant by itself: of new shapes one after another, as a user makes them, and the memory of one."""

import statistics
from typing import Any

import accel
from accel.bench.llm.cases import Work
from accel.bench.llm.models import prompt
from accel.bench.llm.variants import Variant
from accel.bench.memory import peak_mb
from accel.bench.timing import seconds

# (rows, tokens of the prompt, new tokens), each unlike the one before.
CALLS = (
    (1, 37, 12),
    (1, 301, 24),
    (2, 65, 12),
    (1, 1003, 12),
    (3, 129, 40),
    (1, 38, 150),
    (8, 77, 12),
    (5, 450, 12),
    (1, 3001, 12),
    (17, 33, 12),
    (1, 40, 12),
    (100, 36, 12),
)
UNSETTLED, SETTLED = 2, 2  # a shape's first call may compile, its second captures graphs; later ones are steady


def latency_row(work: Work, variant: Variant) -> dict:
    """Seconds of a shape's first two calls and of steady ones; worst_s: what the slowest takes beyond the latter."""
    found: list[dict[str, Any]] = []
    for batch, tokens, new in CALLS:
        if tokens + new > work.most:
            continue
        inputs = prompt(work.stock, batch, tokens, seed=len(found) + 1)

        def run(inputs: dict = inputs, new: int = new) -> float:
            return seconds(lambda: variant.generate(inputs, new), work.device)

        first, second = (run() for _ in range(UNSETTLED))
        steady = statistics.mean(run() for _ in range(SETTLED))
        times = {"first_s": first, "second_s": second, "steady_s": steady}
        found.append({"batch": batch, "context": tokens, "new tokens": new, **times})
    worst = max(found, key=_beyond)
    about = {name: worst[name] for name in ("batch", "context", "new tokens")}
    return {
        "variant": variant.name,
        "worst_s": round(_beyond(worst), 4),
        "worst_call": about,
        "calls": [{name: round(value, 4) for name, value in call.items()} for call in found],
    }


def _beyond(call: dict) -> float:
    return max(call["first_s"], call["second_s"]) - call["steady_s"]


def memory_row(work: Work, optimized: Variant, batch: int) -> dict:
    """MiB at the peak of a call, weights included; kv_mb: keys and values of every token of it. None on a CPU.

    optimized: is stock meanwhile, and optimized afterwards.
    """
    context = work.contexts[0]
    inputs = prompt(work.stock, batch, context)

    def call() -> None:
        optimized.generate(inputs, work.many)

    def first() -> None:
        accel.optimize(optimized.model)
        call()

    accel.restore(optimized.model)
    try:
        stock = peak_mb(work.device, call, call)
        ours = peak_mb(work.device, first, call)
    finally:
        accel.optimize(optimized.model)
    return {
        "batch": batch,
        "context": context,
        "new tokens": work.many,
        "stock": stock,
        "accel": ours,
        "kv_mb": round(work.traffic.cache(batch, context + work.many) / 2**20, 3),
        "weights_mb": round(sum(p.nbytes for p in work.stock.parameters()) / 2**20, 1),
    }
