"""Exchanges of heads for tokens over the cards of one host, by NCCL and through rooms, in a CUDA graph of 64.

    torchrun --nproc-per-node N benchmarks/exchanges_over_cards.py OUT.json

Queries, keys and values of a divided sequence become heads of the whole one, and what attention gives becomes tokens
again: with the copies that diffusers has around each collective, and without. What both give is compared to the bit,
also where sizes follow each other in any order. Rank 0 writes.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accel_kernels.collective import exchange_triton
from accel_kernels.collective.exchange import ExchangeRoom
from sums_over_cards import microseconds

from accel.bench.machine import provenance
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.ranks.pieces import sent_pieces

SIZES = {
    "flux": (1, 4608, 24, 128),
    "flux, 512 px": (1, 1536, 24, 128),
    "odd": (3, 250, 8, 40),
}  # B, tokens, heads, dim
ROOM = 128 * 2**20


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

    def pieces(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.ranks, -1)).permute(2, 1, 0, 3, 4)

    def whole(self, came: torch.Tensor) -> torch.Tensor:
        return came.flatten(0, 1).permute(1, 0, 2, 3)

    def back(self) -> torch.Tensor:
        return self.attended.transpose(1, 2).unflatten(1, (self.ranks, -1)).permute(1, 3, 0, 2, 4)

    def tokens(self, came: torch.Tensor) -> torch.Tensor:
        return came.flatten(0, 1).permute(1, 2, 0, 3)


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


def measure(name: str, room: ExchangeRoom, device: torch.device) -> dict[str, Any]:
    one = Attention(SIZES[name], room.ranks, device)
    ways = {
        "queries, keys, values": ([one.pieces(x) for x in one.given], one.whole),
        "back": ([one.back()], one.tokens),
    }
    row: dict[str, Any] = {"size": name, "bytes sent": one.given[0].nbytes * (room.ranks - 1) // room.ranks}
    for what, (pieces, see) in ways.items():
        exchange = exchange_of(pieces, see)
        ours = partial(exchange, pieces, room)
        wanted = [through_library(x, see) for x in pieces]
        for got, want in zip(ours(), wanted, strict=True):
            assert torch.equal(got, want), f"{name}, {what}"
        row[f"{what}, library_us"] = round(microseconds(lambda p=pieces, s=see: [through_library(x, s) for x in p]), 1)
        row[f"{what}, rooms_us"] = round(microseconds(ours), 1)
    return row


def one_after_another(room: ExchangeRoom, device: torch.device) -> int:
    """How many of 200 went wrong: a place that is written to too early would show."""
    cases = [Attention(size, room.ranks, device) for size in SIZES.values()]
    steps = []
    for one in cases:
        for pieces, see in (([one.pieces(x) for x in one.given], one.whole), ([one.back()], one.tokens)):
            steps.append((exchange_of(pieces, see), pieces, [through_library(x, see) for x in pieces]))
    wrong = 0
    for turn in range(200):
        exchange, pieces, wanted = steps[turn * 7 % len(steps)]
        if room.rank == turn % room.ranks:
            torch.cuda._sleep(20_000)
        got = exchange(pieces, room, 4096 * (turn % 3))
        wrong += sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="other numbers of programs, warps and steps, for Flux")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    room = ExchangeRoom(dist.group.WORLD, device, ROOM)
    result: dict[str, Any] = {"case": "exchanges-over-cards", "ranks": room.ranks, **provenance(device, torch.bfloat16)}
    result["rows"] = [measure(name, room, device) for name in SIZES]
    result["one after another"] = {"of": 200, "wrong": one_after_another(room, device)}
    if options.sweep:
        result["sweep"] = sweep(room, device)
    if room.rank == 0:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(*result["rows"], result["one after another"], *result.get("sweep", ()), sep="\n", flush=True)
    assert not result["one after another"]["wrong"]
    dist.destroy_process_group()


def sweep(room: ExchangeRoom, device: torch.device) -> list[dict[str, Any]]:
    rows, most = [], room.programs
    for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
        for programs in (most // 4, most // 2, most):
            exchange_triton.BLOCK, exchange_triton.WARPS, room.programs = block, warps, programs
            row = {"block": block, "warps": warps, "programs": programs}
            one = Attention(SIZES["flux"], room.ranks, device)
            for what, pieces, see in (
                ("qkv", [one.pieces(x) for x in one.given], one.whole), ("back", [one.back()], one.tokens)
            ):  # fmt: skip
                exchange = exchange_of(pieces, see)
                row[f"{what}_us"] = round(microseconds(partial(exchange, pieces, room)), 1)
                row[f"{what} without waiting before_us"] = round(
                    microseconds(partial(exchange, pieces, room, waits=False)), 1
                )
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
