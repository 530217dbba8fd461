"""Sums over the cards of one host by each way there is, in microseconds; run by `benchmarks/many_cards_text.py`."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accel.parallel.ranks import Ranks

SUMS = (8 * 2**10, 64 * 2**10, 256 * 2**10, 512 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)  # bytes


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def sums(ranks: Ranks, device: torch.device) -> list[dict]:
    """Sums over cards by each way, in a CUDA graph of 64; and how far ours is from the sum in float32."""
    ranks.open(device)
    memory = ranks.memory
    rows = []
    for size in SUMS:
        generator = torch.Generator(device).manual_seed(ranks.rank)
        part = torch.randn(size // 2 // 4096 or 1, min(4096, size // 2), generator=generator, device=device).bfloat16()
        residual, bias = torch.ones_like(part), torch.full_like(part[0], 0.5)
        wanted = part.float()
        dist.all_reduce(wanted)
        row: dict[str, Any] = {"bytes": size}
        ways: dict[str, Callable] = {"nccl": lambda part=part: dist.all_reduce(part.clone())}
        ways["copy alone"] = lambda part=part: part.clone()
        if memory is not None:
            found = memory.sum(part)
            if found is not None:
                row["off"] = off(found.float(), wanted)
                row["off_nccl"] = off(ranks.sum(part.clone()).float(), wanted)
                both = memory.sum(part, bias, residual, 0.25)
                row["off_with_more"] = off(both.float(), 1 + 0.25 * (wanted + 0.5))
                same = found.clone()
                dist.broadcast(same, 0)
                row["equal_on_all"] = bool(torch.equal(same, found))
                ways["ours"] = lambda part=part: memory.sum(part)
                ways["ours, bias and residual"] = lambda p=part, b=bias, r=residual: memory.sum(p, b, r, 0.25)
        for name, way in ways.items():
            row[name + "_us"] = round(microseconds(way), 2)
        rows.append(row)
    if memory is not None:  # many of all sizes one after another: a place that is taken too early would show
        wrong = 0
        for turn in range(300):
            count = 1024 * (1 + turn * 7 % 60) + turn % 5
            part = torch.full((count,), float(ranks.rank + 1 + turn % 11), device=device, dtype=torch.bfloat16)
            part *= torch.arange(count, device=device) % 3
            wanted = part.float()
            got = memory.sum(part).float()
            dist.all_reduce(wanted)
            wrong += int(not torch.equal(got, wanted.bfloat16().float()))
        rows.append({"one after another": 300, "wrong": wrong})
    return rows


def microseconds(way: Callable, times: int = 64) -> float:
    """Of one, of so many in a CUDA graph."""
    way()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            way()
    found = []
    for _ in range(5):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / times * 1e3)
    return statistics.median(found)
