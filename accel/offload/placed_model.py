"""One model whose weights go to a GPU and come back, always to the same addresses on either side."""

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from accel.errors import logged
from accel.offload.budget import Budget
from accel.offload.layout import CPU, Layout, as_ordinary, lay_out, unmovable, weights_in
from accel.offload.memory import Addresses, Mapping
from accel.offload.piece import PlacedWeights
from accel.patching.owner import PartlyCopied

ROW = 8192  # numbers of 8 bytes: the bytes of a model are a table, of which sums over rows and columns are compared
PART = 2048  # rows summed at once: of more, a GPU's sums of columns take 0.2 GB on the way
RESTLESS = 3  # times in a row that weights were laid side by side for one visit alone, after which they are not again


class PlacedModel(PartlyCopied):
    """A model and its two places.

    On its way to the GPU all bytes are copied at once; on its way back only if they have changed. Checksums tell that,
    since an update through `.data`, as merging adapters makes, leaves no other trace. reason: why torch moves its
    weights one by one. prepare(model, device): called before the model goes to the device. budget: that it shares.
    """

    copied: tuple[str, ...] = ("model", "device", "prepare", "budget")

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        prepare: Callable[[nn.Module, torch.device], None],
        budget: Budget | None = None,
    ):
        self.model, self.device, self.prepare, self.budget = model, device, prepare, budget
        self.renew()

    def renew(self) -> None:
        if self.budget is not None:
            self.budget.placed.add(self)
        self.reason: str | None = None
        self.packed: PlacedWeights | None = None  # all of its weights, where they are one piece
        self.pieces: list[PlacedWeights] = []  # where they are several
        self.visits = 0  # to the GPU, from where it lies on the CPU now
        self.single = 0  # layouts in a row that served one visit
        self.addresses: Addresses | None = None
        self.mapping: weakref.ref[Mapping] | None = None
        self.sums: list[torch.Tensor] = []

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Stands in for the model's own `to` where hooks move it."""
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and dtype is None and memory_format is None:
            if device == torch.device("cpu"):
                return self.leave()
            if device == self.device and self.enter():
                return self.model
        return type(self.model).to(self.model, *args, **kwargs)

    def enter(self, here: torch.device = CPU) -> bool:
        """From the CPU to the GPU; where that cannot be, nothing is done, and False returned. here: where it is."""
        self.prepare(self.model, self.device)
        tensors = weights_in(self.model)
        self.reason = unmovable(tensors, here) if tensors else "no weights"
        if self.reason is None:
            try:
                self._pack(tensors)
            except (OSError, RuntimeError, ValueError, MemoryError) as error:
                self.reason = logged(error)  # torch moves it one by one, or says that memory is short
        return self.reason is None

    def let_go(self) -> None:
        """Nothing moves it by this any more; it is on the CPU."""
        self.leave()

    def leave(self) -> nn.Module:
        """From the GPU to the CPU, whoever has moved it there."""
        mapping = None if self.mapping is None else self.mapping()
        if mapping is not None and self.packed is not None:
            self._come_back(mapping.tensor(), self.packed)
        if mapping is not None and self.packed is None and self.single < RESTLESS:
            self._follow()
        type(self.model).to(self.model, "cpu")  # what came to it on the GPU
        del mapping
        self._unmap()
        return self.model

    def _unmap(self) -> None:
        """The memory on the GPU is given back, or belongs to whoever keeps a view of it."""
        self.sums = []
        if self.mapping is not None and self.mapping() is not None:
            self.addresses = None
        self.mapping = None

    def _come_back(self, arena: torch.Tensor, packed: PlacedWeights) -> None:
        present = set(map(id, weights_in(self.model)))
        slots = packed.layout.slots
        there = [slot for slot in slots if id(slot.tensor) in present and slot.lies_in(arena)]
        with as_ordinary():
            if there and not all(map(torch.equal, self.sums, sums(arena))):
                packed.bytes.copy_(arena[: packed.nbytes])
        lay_out(there, packed.bytes)
        if len(there) < max(len(slots), len(present)):
            self.packed = None  # some are others now

    def _follow(self) -> None:
        """Takes over how the weights lie on the GPU, where some were put side by side since they came."""
        tensors = weights_in(self.model)
        if unmovable(tensors, self.device) is None:
            self.packed, self.visits, self.single = PlacedWeights("", Layout(tensors)), 0, self.single + 1

    def _pack(self, tensors: list[torch.Tensor]) -> None:
        """Its weights lie side by side on the CPU, as they did before or from now on, and are copied."""
        packed, present = self.packed, set(map(id, tensors))
        if packed is None or len(packed.layout.slots) != len(present) or not packed.intact(present):
            self.single = self.single + 1 if self.visits == 1 else 0
            if self.single >= RESTLESS:
                raise ValueError("its weights are other ones at every visit")
            packed, self.visits = PlacedWeights("", Layout(tensors)), 0
            self.packed = packed
        if self.visits == 1:  # it comes again; pinning takes as long as a few copies
            if (most := self.may_pin()) is None or packed.nbytes <= most:
                packed.host.pin()
        arena = self._mapped(packed.nbytes)
        with as_ordinary():
            arena[: packed.nbytes].copy_(packed.bytes, non_blocking=True)
            self.sums = sums(arena)
        if arena.is_cuda:
            torch.cuda.current_stream(arena.device).synchronize()
        self.visits += 1
        lay_out(packed.layout.slots, arena)

    def _mapped(self, nbytes: int) -> torch.Tensor:
        if self.addresses is None or self.addresses.nbytes < nbytes:
            self.addresses = self._reserve(-(-nbytes // (8 * ROW)) * 8 * ROW)
        mapping = self.addresses.map()
        self.mapping = weakref.ref(mapping)
        return mapping.tensor()

    def beside(self) -> int:
        """Bytes of the GPU that weights of other models within the same budget have now."""
        others = () if self.budget is None else (one for one in self.budget.placed if one is not self)
        mappings = (None if one.mapping is None else one.mapping() for one in others)
        return sum(one.nbytes for one in mappings if one is not None)

    def may_pin(self, *kept: PlacedWeights) -> int | None:
        """Bytes of RAM that may be pinned within the budget, beside what others and these have; None for all."""
        if self.budget is None or self.budget.host is None:
            return None
        others = [one for one in self.budget.placed if one is not self]
        pieces = chain(kept, *(one.pieces for one in others), filter(None, (one.packed for one in others)))
        return max(0, self.budget.host - sum({id(one.host): one.host.pinned_bytes for one in pieces}.values()))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _reserve(self, nbytes: int) -> Addresses:
        return Addresses(self.device, nbytes)


def sums(arena: torch.Tensor) -> list[torch.Tensor]:
    """Of every row and every column of these bytes, modulo 2 ** 64."""
    table = arena[: arena.nbytes // (8 * ROW) * 8 * ROW].view(torch.int64).view(-1, ROW)
    first, *others = table.split(PART)
    columns = first.sum(0)
    for part in others:
        columns += part.sum(0)
    return [columns, torch.cat([part.sum(1) for part in (first, *others)])]
