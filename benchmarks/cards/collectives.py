"""Sums and exchanges over the cards of one host, by NCCL and through memory that each can read, in a CUDA graph of 64.

    torchrun --nproc-per-node N -m benchmarks collectives OUT.json

Exchanges: queries, keys and values of a divided sequence become heads of the whole one, what attention gives becomes
tokens again: with the copies that diffusers has around each collective, and without. What both give is compared to the
bit, also where sizes follow each other in any order. Sums: of several sizes, with bias and residual too, and how far
ours is from the sum in float32. Rank 0 writes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accel_kernels.collective.exchange import ExchangeRoom

from accel.bench.processes import ranks
from accel.comparison import relative_rms
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.ranks.pieces import sent_pieces
from accel.parallel.ranks import Ranks
from benchmarks.cards.ranks import graph_us
from benchmarks.study import Study

SIZES = {  # B, tokens, heads, dim
    "flux": (1, 4608, 24, 128),
    "flux, 512 px": (1, 1536, 24, 128),
    "odd": (3, 250, 8, 40),
}
ROOM = 128 * 2**20
SUMS = (8 * 2**10, 64 * 2**10, 256 * 2**10, 512 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)  # bytes
TURNS = 200


class Attention:
    """What goes into the attention of one rank, and what comes out of it. x: (B, tokens / ranks, heads, dim), three."""

    def __init__(self, size: tuple[int, ...], ranks: int, device: torch.device):
        batch, tokens, heads, dim = size
        self.ranks, self.own = ranks, tokens // ranks
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        rows = torch.randn(batch, self.own, 3, heads, dim, generator=generator, device=device).bfloat16()
        self.given = [rows[:, :, 0].clone(), rows[:, :, 1].clone(), rows[:, :, 2]]  # values as columns of one product
        shape = (batch, heads // ranks, self.own * ranks, dim)
        self.attended = torch.randn(shape, generator=generator, device=device).bfloat16()

    def ways(self) -> dict[str, tuple[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]]:
        """By name the pieces that are sent, and how what came is seen."""
        there = [x.unflatten(2, (self.ranks, -1)).permute(2, 1, 0, 3, 4) for x in self.given]
        back = self.attended.transpose(1, 2).unflatten(1, (self.ranks, -1)).permute(1, 3, 0, 2, 4)
        return {
            "queries, keys, values": (there, lambda came: came.flatten(0, 1).permute(1, 0, 2, 3)),
            "back": ([back], lambda came: came.flatten(0, 1).permute(1, 2, 0, 3)),
        }


def through_library(pieces: torch.Tensor, see: Callable) -> torch.Tensor:
    sent = pieces.contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent)
    return see(came).contiguous()


def exchange_of(pieces: list[torch.Tensor], see: Callable) -> Exchange:
    shape = tuple(pieces[0].shape)
    view = see(torch.empty(shape, device="meta"))
    found = sent_pieces(shape, tuple(view.shape), view.stride())
    assert found is not None
    all_to_all, group = torch.ops._c10d_functional.all_to_all_single, dist.group.WORLD.group_name
    return Exchange(all_to_all, group, found, [x.stride() for x in pieces])


def exchange_row(name: str, room: ExchangeRoom, device: torch.device) -> dict[str, Any]:
    one = Attention(SIZES[name], room.ranks, device)
    row: dict[str, Any] = {"size": name, "bytes sent": one.given[0].nbytes * (room.ranks - 1) // room.ranks}
    for what, (pieces, see) in one.ways().items():
        ours = partial(exchange_of(pieces, see), pieces, room)
        wanted = [through_library(x, see) for x in pieces]
        for got, want in zip(ours(), wanted, strict=True):
            assert torch.equal(got, want), f"{name}, {what}"
        row[f"{what}, library_us"] = graph_us(lambda p=pieces, s=see: [through_library(x, s) for x in p])
        row[f"{what}, rooms_us"] = graph_us(ours)
    return row


def exchanged_in_turn(room: ExchangeRoom, device: torch.device) -> int:
    """How many of TURNS went wrong: a place that is written to too early would show."""
    steps = []
    for size in SIZES.values():
        for pieces, see in Attention(size, room.ranks, device).ways().values():
            steps.append((exchange_of(pieces, see), pieces, [through_library(x, see) for x in pieces]))
    wrong = 0
    for turn in range(TURNS):
        exchange, pieces, wanted = steps[turn * 7 % len(steps)]
        if room.rank == turn % room.ranks:
            torch.cuda._sleep(20_000)
        got = exchange(pieces, room, 4096 * (turn % 3))
        wrong += sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return wrong


def sum_rows(ranks: Ranks, device: torch.device) -> list[dict]:
    """Sums by each way, and how far ours is from the sum in float32."""
    ranks.open(device)
    memory, rows = ranks.memory, []
    for size in SUMS:
        generator = torch.Generator(device).manual_seed(ranks.rank)
        part = torch.randn(size // 2 // 4096 or 1, min(4096, size // 2), generator=generator, device=device).bfloat16()
        residual, bias = torch.ones_like(part), torch.full_like(part[0], 0.5)
        wanted = part.float()
        dist.all_reduce(wanted)
        row: dict[str, Any] = {"bytes": size}
        ways: dict[str, Callable] = {"nccl": lambda part=part: dist.all_reduce(part.clone()), "copy alone": part.clone}
        if memory is not None and (found := memory.sum(part)) is not None:
            both, same = memory.sum(part, bias, residual, 0.25), found.clone()
            row["off"] = relative_rms(found, wanted)
            row["off_nccl"] = relative_rms(ranks.sum(part.clone()), wanted)
            row["off_with_more"] = relative_rms(both, 1 + 0.25 * (wanted + 0.5))
            dist.broadcast(same, 0)
            row["equal_on_all"] = bool(torch.equal(same, found))
            ways["ours"] = partial(memory.sum, part)
            ways["ours, bias and residual"] = partial(memory.sum, part, bias, residual, 0.25)
        rows.append(row | {f"{name}_us": graph_us(way) for name, way in ways.items()})
    if memory is not None:
        rows.append({"one after another": 300, "wrong": _summed_in_turn(ranks, memory, device)})
    return rows


def _summed_in_turn(ranks: Ranks, memory: Any, device: torch.device) -> int:
    """How many of 300 of all sizes went wrong: a place that is taken too early would show."""
    wrong = 0
    for turn in range(300):
        count = 1024 * (1 + turn * 7 % 60) + turn % 5
        part = torch.full((count,), float(ranks.rank + 1 + turn % 11), device=device, dtype=torch.bfloat16)
        part *= torch.arange(count, device=device) % 3
        wanted = part.float()
        got = memory.sum(part).float()
        dist.all_reduce(wanted)
        wrong += int(not torch.equal(got, wanted.bfloat16().float()))
    return wrong


def main(out: Path) -> None:
    """Needs GPUs."""
    with ranks("nccl") as device:
        room = ExchangeRoom(dist.group.WORLD, device, ROOM)
        record = Study("collectives", out, "sums and exchanges", dtype=torch.bfloat16, ranks=room.ranks, rows=[])
        for name in SIZES:
            record.add("rows", exchange_row(name, room, device))
        wrong = exchanged_in_turn(room, device)
        record.body |= {"one after another": {"of": TURNS, "wrong": wrong}}
        record.body["sums"] = sum_rows(Ranks.of(dist.group.WORLD), device)
        record.save()
        record.show(record.body)
        assert not wrong, f"{wrong} of {TURNS} exchanges were wrong"
