"""Ranks that measure together."""

import statistics
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist

from accel.bench.timing import seconds


def together(function: Callable[[], object], device: torch.device) -> float:
    """Seconds until all ranks are done; they begin at once."""
    dist.all_reduce(torch.zeros(1))
    taken = torch.tensor([seconds(function, device)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def together_s(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """The median of so many."""
    return round(statistics.median(together(function, device) for _ in range(calls)), 5)


def of_all(value: Any) -> list[Any]:
    """What each rank has, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def alike(numbers: Any) -> bool:
    """Whether all ranks hold the same bits."""
    own = torch.as_tensor(numbers).cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return len(set(of_all(blake2b(own).hexdigest()))) == 1


def graph_us(way: Callable[[], object], times: int = 64, rounds: int = 5) -> float:
    """Microseconds of one, of so many in a CUDA graph that all ranks replay at once."""
    way()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            way()
    found = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / times * 1e3)
    return round(statistics.median(found), 2)
