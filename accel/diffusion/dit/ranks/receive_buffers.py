"""Receive buffers for all-to-all: memory that other ranks write into, and the place of each exchange's results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from accel_kernels.collective.exchange import ExchangeRoom

from accel.diffusion.dit.program import TensorValue, refs
from accel.diffusion.dit.ranks.exchanges import Exchange
from accel.diffusion.dit.units import TorchCall, Unit
from accel.errors import reason_of
from accel.parallel.agreement import all_agree
from accel.parallel.ranks import Ranks

PLACE = "exchanges of a block"


class BufferSlot(NamedTuple):
    """begin: bytes before the first result in the buffer. waits: see `ExchangeRoom.exchange`."""

    begin: int
    waits: bool


@dataclass(frozen=True)
class BufferSlots:
    """The slots of a plan's exchanges, by the place of the unit.

    sizes: bytes of the buffer of each group, by its name. forms: equal on ranks that exchange alike.
    The first exchange with a group waits for all ranks, since another plan's results may still be read. A later one
    need not wait: its slot holds nothing that is read after the exchange before it.
    """

    found: dict[int, BufferSlot] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    forms: tuple = ()

    @classmethod
    def of(cls, units: Sequence[Unit], values: list[TensorValue]) -> "BufferSlots":
        held: dict[str, list[tuple[int, int, int]]] = {}  # begin, end, and the last unit that takes what is there
        before: dict[str, int] = {}  # the last exchange so far
        found: dict[int, BufferSlot] = {}
        sizes: dict[str, int] = {}
        forms: list[tuple] = []
        for at, unit in enumerate(units):
            if not isinstance(unit, TorchCall) or not isinstance(unit.step.function, Exchange):
                continue
            exchange, targets = unit.step.function, {values[number].base for number in refs(unit.step.result)}
            size, group = exchange.buffer_bytes(values[min(targets)].dtype.itemsize), exchange.group
            begin = 0
            for start, end, until in sorted(held.setdefault(group, [])):
                if until >= before[group] and begin + size > start and end > begin:
                    begin = end
            last = max(k for k, one in enumerate(units) if k == at or _takes(one, targets, values))
            held[group].append((begin, begin + size, last))
            found[unit.place] = BufferSlot(begin, group not in before)
            sizes[group], before[group] = max(sizes.get(group, 0), begin + size), at
            forms.append((exchange.form, begin))
        return cls(found, sizes, tuple(forms))


def _takes(unit: Unit, bases: set[int], values: list[TensorValue]) -> bool:
    return any(values[number].base in bases for number in unit.takes)


class ReceiveBuffers:
    """The receive buffers of this rank, by the name of the group."""

    def __init__(self) -> None:
        self.found: dict[str, ExchangeRoom] = {}
        self.outgrown: list[ExchangeRoom] = []  # CUDA graphs may still write into them

    def get(self, slots: BufferSlots, group: str) -> ExchangeRoom | None:
        """The group's buffer, where it is large enough for these slots."""
        buffer = self.found.get(group)
        return buffer if buffer is not None and buffer.size >= slots.sizes[group] else None

    def open(self, slots: BufferSlots, groups: dict[str, Ranks], ranks: Ranks, device: torch.device) -> bool:
        """Allocates what these slots need, and returns whether all ranks have it and exchange alike.

        Called by all ranks at once. GPUs must be able to write into each other's memory. groups: by name.
        """
        if not all_agree(ranks, PLACE, (slots.forms, sorted(slots.sizes.values()), device.type)):
            return False
        if device.type != "cuda":
            return False
        for name, group in groups.items():
            if self.get(slots, name) is None and not self._allocate(name, group, ranks, device, slots.sizes[name]):
                return False
        return True

    def _allocate(self, name: str, group: Ranks, ranks: Ranks, device: torch.device, size: int) -> bool:
        buffer = None
        try:
            buffer = ExchangeRoom(group.group, device, size)
        except Exception as error:  # on another host, or out of memory: NCCL exchanges instead
            reason_of(error, memory=True)
        if ranks.any(buffer is None, device) or buffer is None:
            return False
        if name in self.found:
            self.outgrown.append(self.found[name])
        self.found[name] = buffer
        return True
