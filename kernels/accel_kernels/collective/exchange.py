"""Exchanges of pieces between the GPUs of one host: each rank writes what is for another to where that one reads it.

In an all-to-all, rank r is sent piece r of what each rank has. A library needs copies before and after, as it takes
and gives pieces that lie one after another. Here they are written in the order in which they are read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from accel_kernels.collective.symmetric_memory import Shared
from accel_kernels.device import multiprocessors
from accel_kernels.op import FLOATS, launcher

DIMS = 3  # of a piece, at the most
PROGRAMS = 2  # to a multiprocessor
MOST = 2**31 - 1  # numbers of a piece
ALIGNED = 128  # numbers: results begin at multiples of it


class Layout(NamedTuple):
    """How pieces lie where they are read and where they are written; strides in numbers.

    sizes: of the dimensions of a piece, in which the last lies without gaps in both. source, target: their strides.
    source_rank: from the piece for one rank to that for the next. target_rank: from what one rank has sent to what the
    next one has.
    """

    sizes: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    source_rank: int
    target_rank: int

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


class ExchangeRoom:
    """Memory of this rank that the others write into, and theirs. Made by all ranks at once.

    group: of GPUs of one host. device: of this rank. size: bytes. Raises RuntimeError, or whatever torch does, where
    the GPUs cannot reach each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: int):
        self.rank, self.ranks, self.size = dist.get_rank(group), dist.get_world_size(group), size
        self.programs = PROGRAMS * multiprocessors(device)
        self.memory = Shared.zeros(group, device, size, torch.uint8)
        self.cells = Shared.zeros(group, device, 2 * self.programs * self.ranks, torch.int32)
        torch.cuda.synchronize(device)  # cells are zero before the first signal
        dist.barrier(group, device_ids=[device.index])

    def exchange(
        self, tensors: Sequence[torch.Tensor], layouts: Sequence[Layout], place: int, waits: bool = True
    ) -> list[torch.Tensor]:
        """Sends the pieces of each tensor, and gives what was sent to this rank: (ranks * count,) each, in the room.

        tensors: of one dtype and size. layouts: of each; `alike`, and none `unwritable`. place: bytes before the first
        result in the room, a multiple of 16; all take `room_for`. Results are good until something else is sent to
        their place. waits: until all ranks have come. Without it, what is in that place now must not be read after the
        exchange before this one.
        """
        layout, size = layouts[0], tensors[0].element_size()
        each = aligned(self.ranks * layout.numel)
        addresses = self.memory.addresses, self.cells.addresses
        exchange = launcher("accel_kernels.collective.exchange_triton:exchange")
        exchange(tensors, *addresses, place // size, each, layouts, self.rank, self.programs, waits)
        received = self.memory.numbers[place : place + room_for(len(tensors), self.ranks * layout.numel, size)]
        received = received.view(tensors[0].dtype).view(len(tensors), each)
        return list(received[:, : self.ranks * layout.numel].unbind())


def aligned(numbers: int) -> int:
    """How far results of so many numbers lie apart."""
    return -(-numbers // ALIGNED) * ALIGNED


def room_for(tensors: int, numbers: int, size: int) -> int:
    """Bytes of so many results, each of so many numbers of so many bytes."""
    return tensors * aligned(numbers) * size


def alike(layouts: Sequence[Layout]) -> bool:
    """Whether one launch can write them: only their sources may differ."""
    return len({(one.sizes, one.target, one.target_rank) for one in layouts}) == 1


def unwritable(dtype: torch.dtype, layout: Layout) -> str | None:
    """Why pieces of this dtype that lie so cannot be written by the kernel."""
    if dtype not in FLOATS:
        return f"dtype {dtype}"
    if len(layout.sizes) > DIMS or layout.source[-1] != 1 or layout.target[-1] != 1:
        return "pieces in more dimensions, or with gaps between numbers"
    return "a piece of so many numbers" if layout.numel > MOST else None
