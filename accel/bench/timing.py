"""Timing: medians of CUDA events, or of the wall clock on a CPU; variants take turns so that drift hits all alike."""

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")
Fail = Callable[[str, Exception], object]

LEAST_ROUNDS, USUAL_ROUNDS, MOST_ROUNDS, BURST = 2, 5, 7, 40
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
    """Seconds until a deadline; of none, seconds that went by."""

    def __init__(self, total: float = math.inf) -> None:
        self.total, self.start = total, time.perf_counter()

    def taken(self) -> float:
        return time.perf_counter() - self.start

    def left(self) -> float:
        return self.total - self.taken()


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds; in a thread that gets no signals never."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise TimeoutError(f"not done within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    """Waits for a GPU; does nothing for a CPU."""
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


def take_turns(
    samples: Mapping[str, Callable[[], T]],
    *,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
    clock: Clock | None = None,
    fail: Fail | None = None,
) -> dict[str, list[T]]:
    """What the samples give, round by round, forwards and backwards, so that drift hits all alike.

    At least and at most so many rounds; between them until the clock is over. fail(name, error): is told of one that
    fails, which takes no further part and is left out; None lets it raise.
    """
    found: dict[str, list[T]] = {name: [] for name in samples}
    for number in range(most):
        if number >= least and clock is not None and clock.left() <= 0:
            break
        for name in list(found)[:: -1 if number % 2 else 1]:
            try:
                found[name].append(samples[name]())
            except Exception as error:
                if fail is None:
                    raise
                del found[name]
                fail(name, error)
    return found


def same_call(call: Callable[[], T]) -> Callable[[int], T]:
    """A step of `compare_times` that does not depend on its number."""
    return lambda _: call()


def compare_times(
    variants: Mapping[str, Callable[[int], object]],
    device: torch.device,
    *,
    budget_s: float = 2.0,
    warmup: int = 3,
    calls_before: int = 0,
    fail: Fail | None = None,
) -> dict[str, Timing]:
    """Times the variants in turns: `step(i)` runs call number i.

    Each variant is warmed up apart, then gets about `budget_s` seconds over all rounds, at most BURST calls a round.
    Where one takes seconds a call, there are fewer rounds, and calls to warm up: two at least. calls_before: made of
    each whatever they take, in which kernels are chosen and graphs captured.
    """
    for step in variants.values():
        for number in range(calls_before):
            step(number)
    patience = max(budget_s, PATIENCE)
    warm = {name: partial(_warm_up, step, device, warmup, patience) for name, step in variants.items()}
    took = {name: each for name, [each] in take_turns(warm, least=1, most=1, fail=fail).items()}
    rounds = min(USUAL_ROUNDS, max(LEAST_ROUNDS, int(2 * patience / max(took.values(), default=1.0))))
    calls = {name: max(1, min(BURST, int(budget_s / rounds / each))) for name, each in took.items()}
    bursts = {name: partial(burst, variants[name], calls[name], device) for name in took}
    found = take_turns(bursts, least=rounds, most=rounds)
    return {name: Timing.of([one for some in lists for one in some]) for name, lists in found.items()}
