"""Calls of new shapes one after another, as a user makes them: how much longer each takes than when it is repeated."""

import statistics

from accel.bench.llm.cases import Work
from accel.bench.llm.models import prompt
from accel.bench.llm.turns import Variant
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
)
AGAIN = 2  # calls after the first, whose median is the steady time


def row(work: Work, variant: Variant) -> dict:
    """Every call's first and steady seconds; worst_s: the largest difference."""
    found = []
    for batch, tokens, new in CALLS:
        if tokens + new > work.most:
            continue
        inputs = prompt(work.stock, batch, tokens, seed=len(found) + 1)
        times = [
            seconds(lambda inputs=inputs, new=new: variant.generate(inputs, new), work.device) for _ in range(1 + AGAIN)
        ]
        steady = statistics.median(times[1:])
        found.append({"batch": batch, "context": tokens, "new tokens": new, "first_s": times[0], "steady_s": steady})
    worst = max(found, key=lambda call: call["first_s"] - call["steady_s"])
    about = {name: worst[name] for name in ("batch", "context", "new tokens")}
    return {
        "variant": variant.name,
        "worst_s": round(worst["first_s"] - worst["steady_s"], 4),
        "worst_call": about,
        "calls": [{name: round(value, 4) for name, value in call.items()} for call in found],
    }
