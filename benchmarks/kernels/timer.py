"""The one timer of kernels: CUDA graphs of many calls, replayed in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from accel_kernels.warmup import warmup

from accel.bench.timing import seconds, take_turns
from benchmarks.study import DEVICE, TOY

SECONDS = 3e-3  # of a graph, about
MOST_REPEATS = 50
ROUNDS = 7

Call = Callable[[], object]


def times_us(
    runs: Mapping[str, Call | Sequence[Call]], fail: Callable[[str, Exception], None] | None = None
) -> dict[str, float]:
    """Microseconds of one call of each, the medians of a few rounds: the clock follows the temperature and the power.

    runs: a call, or several over operands that are larger together than the GPU's cache. fail(name, error): is told of
    those that no graph can hold, and the others are timed; None lets them raise. Without a GPU the time of a call.
    """
    replays, counts = {}, {}
    for name, run in runs.items():
        calls = [run] if callable(run) else list(run)
        try:
            replays[name], counts[name] = _graphed(lambda calls=calls: [call() for call in calls])
            counts[name] *= len(calls)
        except RuntimeError as error:
            if fail is None:
                raise
            fail(name, error)
            if not TOY:
                torch.cuda.synchronize()
    rounds = 1 if TOY else ROUNDS
    found = take_turns(replays, least=rounds, most=rounds)
    return {name: round(1e6 * statistics.median(times) / counts[name], 3) for name, times in found.items()}


def time_us(*calls: Call) -> float:
    """The same of one run."""
    return times_us({"": calls})[""]


def _graphed(run: Call) -> tuple[Callable[[], float], int]:
    """Seconds of a replay, as a function; and of how many runs it is."""
    if TOY:
        return partial(seconds, run, DEVICE), 1
    run()
    took = seconds(run, DEVICE)
    repeats = max(1, min(MOST_REPEATS, int(SECONDS / took)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    graph.replay()  # the first one is slower

    def replay() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return replay, repeats


def compile_ahead(calls: Sequence[Call]) -> float:
    """Compiles what these would launch, all at once in threads; the seconds it took. A call may raise."""
    start = time.perf_counter()
    if not TOY:
        with warmup():
            for call in calls:
                try:
                    call()
                except (ValueError, RuntimeError) as error:  # told where it is timed
                    print(f"not compiled ahead: {str(error).splitlines()[0][:80]}", flush=True)
    return round(time.perf_counter() - start, 1)


def rand(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device=DEVICE, dtype=dtype).normal_(0, spread)
