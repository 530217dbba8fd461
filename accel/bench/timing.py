"""Timing: medians of CUDA events, or of the wall clock on a CPU; variants take turns so that drift hits all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise

import torch

LEAST_ROUNDS = 2
PATIENCE = 1.0  # seconds: what takes less to warm up and to time is not cut short


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: the median, the quartiles around it, and how many calls were timed."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    calls: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Timing":
        if len(milliseconds) == 1:
            return cls(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        q1, median, q3 = statistics.quantiles(milliseconds, n=4, method="inclusive")
        return cls(median, q1, q3, len(milliseconds))

    def to_dict(self) -> dict:
        return {key: round(value, 4) for key, value in asdict(self).items()}


class Clock:
    """Seconds until a deadline."""

    def __init__(self, total: float) -> None:
        self.total, self.start = total, time.perf_counter()

    def left(self) -> float:
        return self.total - (time.perf_counter() - self.start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, work on the device included."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def burst(step: Callable[[int], object], calls: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `calls` calls in a row: on a GPU without waiting between them, as in a real loop."""
    if device.type != "cuda":
        return [seconds(partial(step, i), device) * 1e3 for i in range(calls)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for i in range(calls):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def _warm_up(step: Callable[[int], object], device: torch.device, calls: int, patience: float) -> float:
    """Seconds of the last of `calls` calls and one more; of fewer, two at least, where they take so many seconds."""
    start = time.perf_counter()
    for i in range(calls + 1):
        each = seconds(partial(step, i), device)
        if i and time.perf_counter() - start > patience:
            break
    return max(each, 1e-6)


def compare_times(
    variants: Mapping[str, Callable[[int], object]],
    device: torch.device,
    *,
    rounds: int = 5,
    budget_s: float = 2.0,
    warmup: int = 3,
    most: int = 40,
    fail: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Times the variants in turns, forwards and backwards: `step(i)` runs call number i.

    Each variant is warmed up apart, then gets about `budget_s` seconds over all rounds, at most `most` calls a round.
    Where one takes seconds a call, there are fewer rounds, and calls to warm up: two at least.
    fail(name, error): is told which variant failed as it was warmed up, and the others are timed; None lets it raise.
    """
    patience = max(budget_s, PATIENCE)
    took = {}
    for name, step in variants.items():
        try:
            took[name] = _warm_up(step, device, warmup, patience)
        except Exception as error:
            if fail is None:
                raise
            fail(name, error)
    rounds = min(rounds, max(LEAST_ROUNDS, int(2 * patience / max(took.values(), default=1.0))))
    calls = {name: max(1, min(most, int(budget_s / rounds / each))) for name, each in took.items()}
    samples: dict[str, list[float]] = {name: [] for name in took}
    order = list(took)
    for _ in range(rounds):
        for name in order:
            samples[name] += burst(variants[name], calls[name], device)
        order.reverse()
    return {name: Timing.of(values) for name, values in samples.items()}
