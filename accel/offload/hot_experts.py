"""Experts of a mixture in pinned memory, where kernels read those that a token chose; the hottest are on the card too.

Every layer has equally many on the card. Which, follows from what routing chose so far: a prompt takes all experts
through the ring, and leaves those on the card that it and what came before it chose most; between two of many steps one
of each layer is exchanged. All of it is done by the GPU, in the order of its stream, in buffers that never move: the
host waits for nothing, and CUDA graphs hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accel_kernels.moe.weights import PLACE_BYTES
from accel_kernels.warmup import warming_up
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from accel.offload.blocks import stacked_experts
from accel.offload.piece import PlacedWeights, WeightPlacement
from accel.offload.ring import Ring
from accel.patching.fast_forward import FastForward

DECAY = 0.5  # of what was counted before a prompt, and before an exchange
EVERY = 32  # calls between two exchanges
SAMPLE = 4096  # numbers of 8 bytes of an expert, from one that is compared to the next
PAIRS = 4  # choices of an expert in a step, on average, with which kernels still read it about once
GAIN = 1.5  # how much hotter an expert is than the one that it replaces


def stacks_in(model: nn.Module, pieces: list[PlacedWeights]) -> dict[str, FastForward]:
    """By path what reads the experts of each piece, where all blocks consist of such, lying on the CPU; else none."""
    modules, found = stacked_experts(model), {}
    for piece in pieces:
        if piece.path in modules:
            forward = vars(modules[piece.path])["forward"]
            parts = (one for one in forward.readable().parts() if one is not None)
            starts = ((one.data_ptr() - piece.bytes.data_ptr(), one.nbytes) for one in parts)
            if all(0 <= start <= piece.nbytes - length for start, length in starts):
                found[piece.path] = forward
    return found if len(found) == sum(bool(piece.path) for piece in pieces) else {}


class ExpertTables:
    """Where the experts of every layer are, and how often they were read.

    Graphs read, count and choose there: so it stays while the model streams, however many are on the card.
    """

    def __init__(self, layers: int, experts: int, columns: int, device: torch.device):
        with torch.inference_mode(False):
            self.everyone = torch.arange(experts, device=device)
            self.places = torch.zeros(layers, experts, columns, dtype=torch.int64, device=device)
            self.spots = self.everyone.repeat(layers, 1)  # e, of what is on the card e + experts: a column of `reads`
            self.reads = torch.zeros(layers, 2 * experts, device=device)
            self.heat = torch.zeros(layers, experts, device=device)
            self.one = torch.ones(1, device=device)
            self.slots = torch.zeros(layers, experts, dtype=torch.int64, device=device)  # which expert is there
            self.home, self.card = torch.zeros_like(self.places[0]), torch.zeros_like(self.places)

    def begin(self) -> None:
        """No expert is on the card; what was read heats."""
        self.heat.copy_(self.hot())
        self.reads.zero_()
        self.places.zero_()
        self.spots.copy_(self.everyone.expand_as(self.spots))

    def hot(self) -> torch.Tensor:
        """(layers, experts)."""
        return self.heat + self.reads.unflatten(1, (2, -1)).sum(1)


class HotExperts:
    """Of layers that stream, whose experts are alike: so many, and of such sizes.

    streamed: the model that this belongs to, which keeps its tables. rows, pieces, forwards: of each layer; its row in
    `ExpertTables`. memory: of the card, for `copies` experts of each layer.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(
        self,
        streamed: Any,
        rows: list[int],
        pieces: list[PlacedWeights],
        forwards: list[FastForward],
        device: torch.device,
        ring: Ring,
        memory: torch.Tensor,
        copies: int,
    ):
        self.pieces, self.forwards, self.ring, self.copies = pieces, forwards, ring, copies
        self.seen = [piece.on_device(device) for piece in pieces]  # None where kernels cannot read it
        for number, piece in enumerate(pieces):
            piece.put(WeightPlacement.RING, ring.buffers[number % len(ring.buffers)][: piece.nbytes])
            if (seen := self.seen[number]) is not None:
                piece.put(WeightPlacement.CARD, seen)
                piece.placement = WeightPlacement.PINNED
                piece.go(WeightPlacement.CARD, WeightPlacement.HOST)
        weights = [forward.readable() for forward in forwards]  # type: ignore[attr-defined]
        self.experts, steps, layers = weights[0].experts, weights[0].steps(), len(pieces)
        sizes, tables = (len(streamed.stacks), self.experts, len(steps)), streamed.tables
        if tables is None or tables.places.shape != sizes:  # of another model: no graph of before is replayed
            tables = streamed.tables = ExpertTables(*sizes, memory.device)
        self.tables = tables
        tables.begin()
        self.rows = torch.tensor(rows, device=memory.device)
        self.slots = tables.slots[:layers, :copies].zero_()
        apart = torch.tensor(steps, device=memory.device)
        self.home = tables.home.copy_(tables.everyone[:, None] * apart // PLACE_BYTES)
        card = torch.zeros(layers, copies, len(steps), dtype=torch.int64, device="cpu")
        self.places, self.spots, self.reads, self.heat = (
            [one[row] for row in rows] for one in (tables.places, tables.spots, tables.reads, tables.heat)
        )
        self.parts: list[list[tuple[int, int]]] = []  # of each layer: where each tensor begins, bytes of an expert
        self.copied: list[list[torch.Tensor]] = []  # of each: those on the card
        at = 0
        for i, (one, piece, bytes_) in enumerate(zip(weights, pieces, self.seen, strict=True)):
            self.parts.append([])
            self.copied.append([])
            for column, (tensor, step) in enumerate(zip(one.parts(), steps, strict=True)):
                if tensor is None:
                    continue
                start = tensor.data_ptr() - piece.bytes.data_ptr()
                self.parts[i].append((start, step))
                copied = memory[at : at + copies * step]
                self.copied[i].append(copied.view(torch.int64).view(copies, step // 8))
                base = (bytes_ if bytes_ is not None else piece.bytes).data_ptr() + start
                first = copied.data_ptr() - base
                card[i, :, column] = (first + step * torch.arange(copies, device="cpu")).div(
                    PLACE_BYTES, rounding_mode="floor"
                )
                at += copies * step
        for i, forward in enumerate(forwards):
            forward.held = LayerExperts(self, i)  # type: ignore[attr-defined]
        self.card = tables.card[:layers, :copies].copy_(card)
        for i, bytes_ in enumerate(self.seen):
            self.fill(i, pieces[i].bytes if bytes_ is None else bytes_)
        self.calls = self.size = 0
        self.versions = self._versions()

    def let_go(self) -> None:
        """Nothing of the card is held any more."""
        for forward in self.forwards:
            forward.held = None  # type: ignore[attr-defined]

    def few(self, i: int, index: torch.Tensor) -> bool:
        """Whether kernels read these choices of layer i where they are: rather than all, fewer than there are, or in a
        step those that are not on the card. A prompt brings all, and says which are to stay.
        """
        most = self.experts if self.size else PAIRS * self.experts
        return self.seen[i] is not None and index.numel() <= most

    def note(self, i: int, index: torch.Tensor) -> None:
        """These are read."""
        flat = index.flatten()
        self.reads[i].scatter_add_(0, self.spots[i][flat], self.tables.one.expand(len(flat)))

    def follow(self, i: int, index: torch.Tensor, source: torch.Tensor) -> None:
        """A prompt chose these, and all experts of the layer are on the card now, as these bytes."""
        flat = index.flatten()
        self.heat[i].mul_(DECAY).scatter_add_(0, flat, self.tables.one.expand(len(flat)))
        self.fill(i, source)

    def fill(self, i: int, source: torch.Tensor) -> None:
        """The hottest of layer i are copied from these bytes of all."""
        if not self.copies:
            return
        hot = (self.heat[i] + self.reads[i].unflatten(0, (2, -1)).sum(0)).topk(self.copies).indices
        for every, copied in zip(self._each(i, source), self.copied[i], strict=True):
            if every.device == copied.device:
                torch.index_select(every, 0, hot, out=copied)
            else:  # bytes that the GPU cannot read by itself
                copied.copy_(every[hot.cpu()])
        self.slots[i].copy_(hot)
        self.places[i].zero_().index_copy_(0, hot, self.card[i] - self.home[hot])
        self.spots[i].copy_(self.tables.everyone).index_copy_(0, hot, hot + self.experts)

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin_call(self, size: int, step: bool = False) -> None:
        """size: of what it is given; 0 for many steps, of which this is a later one."""
        self.calls += 1
        new = size > self.size or not (size or step)  # calls of one size may be steps, too many to compare samples in
        if self.copies and (new or self._versions() != self.versions) and self.stale():
            for i, seen in enumerate(self.seen):
                self.fill(i, self.pieces[i].bytes if seen is None else seen)
        elif self.calls % EVERY == 0:
            self.exchange()
        self.size = size

    def stale(self) -> bool:
        """Whether somebody has changed experts that are on the card too: as autograd counts, or as samples show."""
        versions, self.versions = self.versions, self._versions()
        apart = [torch.zeros((), dtype=torch.bool, device=self.slots.device)]
        for i, seen in enumerate(self.seen):
            for every, copied in zip(self._each(i, seen), self.copied[i], strict=False):
                apart.append((every[:, ::SAMPLE][self.slots[i]] != copied[:, ::SAMPLE]).any())
        return versions != self.versions or bool(torch.stack(apart).any())

    def _versions(self) -> int:
        tensors = (slot.tensor for piece in self.pieces for slot in piece.layout.slots)
        return sum(tensor._version for tensor in tensors if not tensor.is_inference())

    def exchange(self) -> None:
        """In each layer the hottest expert that is not on the card takes the place of the coldest there, if it pays."""
        if not self.copies:
            return
        tables, rows = self.tables, self.rows
        heat, layers = tables.hot()[rows], torch.arange(len(rows), device=rows.device)
        best, new = heat.masked_fill(tables.spots[rows] >= self.experts, -1).max(1)
        least, slot = heat.gather(1, self.slots).min(1)
        old = self.slots[layers, slot]
        new = torch.where(best > GAIN * least + 1, new, old)
        for i, seen in enumerate(self.seen):
            for every, copied in zip(self._each(i, seen), self.copied[i], strict=False):
                copied.index_copy_(0, slot[i : i + 1], every.index_select(0, new[i : i + 1]))
        tables.places[rows, old], tables.spots[rows, old] = 0, old
        tables.places[rows, new] = self.card[layers, slot] - self.home[new]
        tables.spots[rows, new] = new + self.experts
        self.slots[layers, slot] = new
        tables.reads.mul_(DECAY)
        tables.heat.mul_(DECAY)

    def _each(self, i: int, source: torch.Tensor | None) -> list[torch.Tensor]:
        """The experts of layer i in each tensor, (experts, numbers of 8 bytes), as these bytes have them, if any."""
        if source is None:
            return []
        return [source[at : at + self.experts * n].view(torch.int64).view(self.experts, -1) for at, n in self.parts[i]]

    def share(self) -> float | None:
        """Of what tokens of few read since, that lay on the card; None before the first."""
        off, on = self.tables.reads.unflatten(1, (2, -1)).sum((0, 2)).tolist()
        return on / (on + off) if on + off else None


class LayerExperts:
    """Of one layer, for the fast forward that reads them."""

    def __init__(self, model: HotExperts, number: int):
        self.model, self.number = model, number

    def told(self) -> str:
        """For the report."""
        off, on = self.model.reads[self.number].view(2, -1).sum(1).tolist()
        share = f", {on / (on + off):.0%} of those read lately" if on + off else ""
        return f"{self.model.copies} of {self.model.experts} experts on the card{share}"

    @contextmanager
    def reading(self, index: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Inside, the weights are where kernels may read those that were chosen: at the places given, if any."""
        model, i, asleep = self.model, self.number, warming_up()
        if model.few(i, index):
            if not asleep:
                with _disable_current_modes(), torch.no_grad():
                    model.note(i, index)
            yield model.places[i]
            return
        ring, piece = model.ring, model.pieces[i]
        ring.take(i)
        piece.go(WeightPlacement.RING)
        try:
            yield None
            if not asleep:
                with _disable_current_modes(), torch.no_grad():
                    model.follow(i, index, ring.buffers[i % len(ring.buffers)])
            ring.leave(i)
        finally:
            piece.go(WeightPlacement.CARD, WeightPlacement.RING)
