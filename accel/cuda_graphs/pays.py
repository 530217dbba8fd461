"""Whether fused code is faster on this machine: runs timed in turns, and the rule by which times are judged.

A fast forward gives the GPU less work. But its Python and launches take time on the host, which decides in eager code
with few rows. So it has to win on both.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

GAIN = 0.97  # of stock's time, that is worth it; less of a gain is noise
ROUNDS = 5  # of which the least time counts
CALLS = 10  # of a round, one behind another
SECONDS = 0.02  # after which no more rounds are begun; two are run anyway
WARM = 2  # calls before: kernels are compiled, libraries get ready


class Cost(NamedTuple):
    """Seconds of one call, in a row of calls: until the host has launched it, and until the device has finished it."""

    host: float
    wall: float


def clearly_faster(fused: float, stock: float) -> bool:
    """Whether the time of what is fused is clearly less."""
    return fused < GAIN * stock


def not_slower(fused: float, stock: float) -> bool:
    """Whether what is fused takes no longer."""
    return fused <= max(1.0, GAIN) * stock


def in_turns(
    runs: Sequence[Callable[[], Any]],
    device: torch.device,
    warm: int = WARM,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    seconds: float = SECONDS,
    around: Sequence[Callable[[], AbstractContextManager]] = (),
) -> list[Cost]:
    """The least cost of each of these runs. around: a context for each, which is not timed. Raises what they raise."""
    around = around or [nullcontext] * len(runs)
    for _ in range(warm):
        for run, context in zip(runs, around, strict=True):
            with context():
                run()
    _wait(device)
    found: list[list[Cost]] = [[] for _ in runs]
    until = time.perf_counter() + seconds
    for turn in range(rounds):
        places = range(len(runs)) if turn % 2 else reversed(range(len(runs)))  # who comes first takes turns too
        for place in places:
            with around[place]():
                found[place].append(_cost(runs[place], device, calls))
        if turn and time.perf_counter() > until:
            break
    return [Cost(*map(min, zip(*costs, strict=True))) for costs in found]


def _cost(run: Callable[[], Any], device: torch.device, calls: int) -> Cost:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    launched = time.perf_counter()
    _wait(device)
    return Cost((launched - start) / calls, (time.perf_counter() - start) / calls)


def _wait(device: torch.device) -> None:
    """For the current stream: waiting for the whole device fails while another thread captures."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class LiveTurns:
    """Runs the user's own calls fused and stock in turns, until it is known which is faster.

    The first call of each does not count; the least of two more is compared. Until then `faster` is None.
    reason: why stock runs.
    """

    COUNTED = 2
    faster: str | None = None
    reason: str | None = None

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"fused": [], "stock": []}

    def __call__(self, ways: dict[str, Callable[[], Any]], device: torch.device) -> Any:
        """The result of one of the ways, "fused" or "stock"."""
        if self.faster is not None:
            return ways[self.faster]()
        way = min(self.times, key=lambda name: len(self.times[name]))
        _wait(device)
        start = time.perf_counter()
        result = ways[way]()
        _wait(device)
        self.times[way].append(time.perf_counter() - start)
        if min(map(len, self.times.values())) > self.COUNTED:
            fused, stock = (min(times[1:]) for times in self.times.values())
            self.faster = "fused" if clearly_faster(fused, stock) else "stock"
            if self.faster == "stock":
                self.reason = f"would not pay: {1e3 * fused:.2f} ms fused, {1e3 * stock:.2f} stock"
        return result


def milliseconds(run: Callable, device: torch.device) -> tuple[float, float]:
    """Wall time of one run to its end, and the time until the host has launched all of it."""
    _wait(device)
    found = _cost(run, device, 1)
    return 1000 * found.wall, 1000 * found.host
