"""Sums over the GPUs of one host through symmetric memory, and which of three ways takes a sum of some size.

Small ones are one launch with what follows them (`symmetric_sum_triton.py`), larger ones torch's
`two_shot_all_reduce_`, the largest NCCL. NVLink multicast is not used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accel_kernels.device import card
from accel_kernels.op import FLOATS, launcher
from accel_kernels.self_check import needs_check

# Bytes of a part up to which every rank reads all of them: of two ranks each reads no more than it would in shares.
ONE_SHOT, ONE_SHOT_OF_TWO = 512 * 2**10, 16 * 2**20
TWO_SHOT = 32 * 2**20  # up to which torch's kernel adds shares; NCCL is as fast for more
PIECE = 1024  # numbers to a program of the one-shot kernel, at the most
LEAST = 2  # bytes of a number
INSIDE, OUTSIDE = (2, 0, 1), (3, 4)  # places for parts: of a forward the first, then the others in turn; of other calls


class Shared(NamedTuple):
    """numbers: of this rank, (count,). addresses: of each rank's, (ranks,) int64. handle: keeps them there."""

    numbers: Tensor
    addresses: Tensor
    handle: Any

    @classmethod
    def zeros(cls, group: dist.ProcessGroup, device: torch.device, count: int, dtype: torch.dtype) -> "Shared":
        """So many that all ranks can read and write. Called by all of them at once.

        Raises as torch does, where the GPUs cannot reach each other's memory; RuntimeError where no test ran on such
        GPUs, since a kernel that waits for another rank cannot check itself.
        """
        if needs_check(device):
            raise RuntimeError(f"no test of shared memory ran on a {card(device).name}")
        import torch.distributed._symmetric_memory as symmetric

        numbers = symmetric.empty(count, dtype=dtype, device=device).zero_()
        handle = symmetric.rendezvous(numbers, group)
        addresses = [handle.buffer_ptrs[rank] for rank in range(dist.get_world_size(group))]
        return cls(numbers, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


class SymmetricMemory:
    """Memory of this rank that the others can read, and theirs. Made by all ranks at once.

    group: of GPUs of one host. device: of this rank. Raises RuntimeError, or whatever torch does, where the GPUs cannot
    read each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        places = len(INSIDE) + len(OUTSIDE)
        self.one_shot = ONE_SHOT_OF_TWO if self.size == 2 else ONE_SHOT
        pieces = self.one_shot // LEAST // PIECE
        sizes = ((places * self.one_shot, torch.uint8), (pieces * self.size, torch.int32), (TWO_SHOT, torch.uint8))
        self.parts, self.cells, self.shares = (Shared.zeros(group, device, *one) for one in sizes)
        self.inside, self.turn = False, 0
        self.nothing = torch.zeros(8, device=device)
        torch.cuda.synchronize(device)  # cells are zero before the first signal
        dist.barrier(group, device_ids=[device.index])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, sums take their places in an order that is the same in each forward.

        No two sums after another may use one place: a rank may write its next part while others still read the last.
        Graphs remember places; so the first of every forward is one that no other sum of it takes, and there are two.
        """
        before = self.inside, self.turn
        self.inside, self.turn = True, 0
        try:
            yield
            if self.turn == 1:
                self.sum(self.nothing)
        finally:
            self.inside, self.turn = before

    def sum(
        self, part: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, scale: float = 1.0
    ) -> Tensor | None:
        """residual + scale * (sum over ranks + bias), like part, equal on all ranks to the bit; None for a sum that
        NCCL is to make.

        part: (..., N), contiguous. bias: (N,); residual: like part; both absent: the sum alone.
        """
        size = part.numel() * part.element_size()
        if part.dtype not in FLOATS or not part.is_contiguous():
            return None
        if size <= self.one_shot:
            place = self._place() * self.one_shot // part.element_size()
            residual = None if residual is None else residual.contiguous()
            kernel = launcher("accel_kernels.collective.symmetric_sum_triton:symmetric_sum")
            addresses = self.parts.addresses, self.cells.addresses
            return kernel(part, bias, residual, float(scale), *addresses, place, self.rank)
        if size > TWO_SHOT or size % (16 * self.size):
            return None
        shares = self.shares.numbers[:size].view(part.dtype).view(part.shape)
        shares.copy_(part)
        torch.ops.symm_mem.two_shot_all_reduce_(shares, "sum", self.group.group_name)
        total = shares if bias is None else shares + bias
        if residual is not None:
            return torch.add(residual, total, alpha=scale)
        return total.clone() if total is shares else total

    def _place(self) -> int:
        turn, self.turn = self.turn, self.turn + 1
        if not self.inside:
            return OUTSIDE[turn % 2]
        return INSIDE[0] if turn == 0 else INSIDE[1 + turn % 2]
