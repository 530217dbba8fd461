"""Rooms that the ranks of one model write into, and where in them the exchanges of a plan have their results."""

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


class RoomPlace(NamedTuple):
    """begin: bytes before the first result in the room. waits: see `ExchangeRoom.exchange`."""

    begin: int
    waits: bool


@dataclass(frozen=True)
class Places:
    """Of the exchanges of a plan, by the place of the unit. sizes: bytes of the room of each group, by its name. forms:
    equal on ranks that exchange alike.

    The first exchange with a group waits until all have come, so that of other plans nothing is read any more. A later
    one takes no place that is read after the one before it, and need not wait.
    """

    found: dict[int, RoomPlace] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    forms: tuple = ()

    @classmethod
    def of(cls, units: Sequence[Unit], values: list[TensorValue]) -> "Places":
        held: dict[str, list[tuple[int, int, int]]] = {}  # begin, end, and the last unit that takes what is there
        before: dict[str, int] = {}  # the last exchange so far
        found: dict[int, RoomPlace] = {}
        sizes: dict[str, int] = {}
        forms: list[tuple] = []
        for at, unit in enumerate(units):
            if not isinstance(unit, TorchCall) or not isinstance(unit.step.function, Exchange):
                continue
            exchange, targets = unit.step.function, {values[number].base for number in refs(unit.step.result)}
            size, group = exchange.room(values[min(targets)].dtype.itemsize), exchange.group
            begin = 0
            for start, end, until in sorted(held.setdefault(group, [])):
                if until >= before[group] and begin + size > start and end > begin:
                    begin = end
            last = max(k for k, one in enumerate(units) if k == at or _takes(one, targets, values))
            held[group].append((begin, begin + size, last))
            found[unit.place] = RoomPlace(begin, group not in before)
            sizes[group], before[group] = max(sizes.get(group, 0), begin + size), at
            forms.append((exchange.form, begin))
        return cls(found, sizes, tuple(forms))


def _takes(unit: Unit, bases: set[int], values: list[TensorValue]) -> bool:
    return any(values[number].base in bases for number in unit.takes)


class Rooms:
    """By the name of the group."""

    def __init__(self) -> None:
        self.found: dict[str, ExchangeRoom] = {}
        self.former: list[ExchangeRoom] = []  # which graphs may still write into

    def get(self, places: Places, group: str) -> ExchangeRoom | None:
        """The one in which these have room."""
        room = self.found.get(group)
        return room if room is not None and room.size >= places.sizes[group] else None

    def open(self, places: Places, groups: dict[str, Ranks], ranks: Ranks, device: torch.device) -> bool:
        """Makes what these need, where the GPUs can write into each other's memory. Called by all ranks at once.

        groups: by name. ranks: all that compute together. Whether all of them exchange alike and have the rooms.
        """
        if not all_agree(ranks, PLACE, (places.forms, sorted(places.sizes.values()), device.type)):
            return False
        if device.type != "cuda":
            return False
        for name, group in groups.items():
            if self.get(places, name) is None and not self._opened(name, group, ranks, device, places.sizes[name]):
                return False
        return True

    def _opened(self, name: str, group: Ranks, ranks: Ranks, device: torch.device, size: int) -> bool:
        room = None
        try:
            room = ExchangeRoom(group.group, device, size)
        except Exception as error:  # of another host, or without memory for it: the library finds a way
            reason_of(error, memory=True)
        if ranks.any(room is None, device) or room is None:
            return False
        if name in self.found:
            self.former.append(self.found[name])
        self.found[name] = room
        return True
