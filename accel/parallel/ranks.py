"""The ranks that share one model: a group of processes, and the sums of what each of them has computed."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accel_kernels.collective.symmetric_memory import SymmetricMemory

from accel.errors import RanksApart, Refused, reason_of

GROUPS = 64  # that are remembered; whoever makes more has them made anew


class Ranks:
    """A group of processes, and which of them this is. One object a group, see `of`; copies of a model share it.

    group: a `torch.distributed.ProcessGroup`. rank, size: of this process in it, and of the group. begun, ended:
    exchanges that this rank has started and finished. Where they differ, or differ between ranks, a rank would take one
    exchange for the next.
    """

    def __init__(self, group: "dist.ProcessGroup"):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self.begun = self.ended = 0
        self.lost = ""  # why the others cannot be reached any more
        self.taken = ""  # what computes with them on a thread of its own; nothing else may meanwhile
        self.paused = False  # whether that thread waits until all ranks let it go on
        self.memory: SymmetricMemory | None = None  # of GPUs that can read each other's, once `open` has been called

    @staticmethod
    def of(group: "dist.ProcessGroup") -> "Ranks":
        """The one object of this group."""
        return _of(group)

    def open(self, device: torch.device) -> None:
        """Lets sums of small parts go through memory that the GPUs share, where they can; all ranks at once."""
        if self.memory is not None or device.type != "cuda" or self.size == 1:
            return
        memory = None
        try:
            memory = SymmetricMemory(self.group, device)
        except Exception as error:  # of another host, or without a way to its memory: NCCL finds one
            reason_of(error)
        self.memory = None if self.any(memory is None, device) else memory

    def forward(self) -> AbstractContextManager[None]:
        """Around each forward of the model; see `SymmetricMemory.forward`."""
        return nullcontext() if self.memory is None else self.memory.forward()

    def __deepcopy__(self, memo: dict) -> "Ranks":
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model whose layers are divided among ranks cannot be pickled; save it by save_pretrained")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and other.members == self.members

    def __hash__(self) -> int:
        return hash(self.members)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what all ranks do together. Raises `errors.RanksApart` where one has ended, or does not come."""
        if self.lost:
            raise RanksApart(self.lost)
        self.begun += 1
        try:
            yield
        except RuntimeError as error:
            # Nothing was sent in a capture: whoever captures runs the call again without a graph.
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.begun -= 1
                raise
            if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                raise
            self.lost = f"rank {self.rank} of {self.size} has lost the others: {str(error).partition(chr(10))[0]}"
            raise RanksApart(self.lost) from error
        self.ended += 1

    @property
    def in_step(self) -> str:
        """A value that is equal on all ranks as long as none has missed an exchange."""
        return self.lost or (f"{self.begun}" if self.whole else f"interrupted in number {self.begun}")

    @property
    def whole(self) -> bool:
        """Whether every exchange has ended."""
        return not self.lost and self.begun == self.ended

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in the place of this rank's part; equal on all of them, to the bit."""
        with self.exchange():
            dist.all_reduce(part, group=self.group)
        return part

    def first(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the first rank has, in the place of what this one has."""
        with self.exchange():
            dist.broadcast(tensor, self.members[0], group=self.group)
        return tensor

    def reduce(
        self,
        part: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """residual + scale * activation(sum over all ranks + bias), what follows a product of divided inputs.

        part: (..., N), this rank's, which may be overwritten. bias: (N,); residual: like part.
        """
        if self.memory is not None and part.is_cuda and activation is None:
            with self.exchange():
                found = self.memory.sum(part, bias, residual, scale)
            if found is not None:
                return found
        y = self.sum(part)
        if bias is not None:
            y = y + bias
        if activation is not None:
            y = activation(y)
        return y if residual is None else torch.add(residual, y, alpha=scale)

    def gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """All ranks' parts, (..., sizes[rank]), side by side along the last dimension."""
        most = max(sizes)
        rows = part.reshape(-1, part.shape[-1])
        rows = rows if part.shape[-1] == most else F.pad(rows, (0, most - part.shape[-1]))
        found = rows.new_empty(self.size * len(rows), most)
        with self.exchange():
            dist.all_gather_into_tensor(found, rows.contiguous(), group=self.group)
        side_by_side = found.unflatten(0, (self.size, -1)).movedim(0, 1)  # (rows, ranks, most)
        if min(sizes) < most:
            side_by_side = torch.cat([side_by_side[:, rank, :size] for rank, size in enumerate(sizes)], dim=-1)
        return side_by_side.reshape(*part.shape[:-1], -1)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' values, each in the place of this rank's."""
        with self.exchange():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank. Waits for all of them."""
        return bool(self.largest(torch.tensor([flag], dtype=torch.int32, device=device)).item())


@lru_cache(maxsize=GROUPS)
def _of(group: "dist.ProcessGroup") -> Ranks:
    return Ranks(group)


def chunk_sizes(total: int, ranks: int) -> list[int]:
    """How many of so many rows each rank holds, as `torch.chunk` and DTensor divide them: the last may have fewer."""
    most = -(-total // ranks)
    return [max(0, min(most, total - rank * most)) for rank in range(ranks)]


STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each process


def world(asked: str) -> Ranks:
    """All ranks; makes the group of them where torchrun has started this process and nobody has made it yet.

    asked: the option that needs them, for errors. Raises `errors.Refused` where there is no other process.
    """
    valid = "it needs two or more processes, one a card: start the script by `torchrun --nproc-per-node 2 SCRIPT`, or "
    valid += "call torch.distributed.init_process_group first"
    if not dist.is_available():
        raise Refused(f"{asked}: this torch has no torch.distributed")
    if not dist.is_initialized():
        if not all(name in os.environ for name in STARTED):
            raise Refused(f"{asked}: this process is alone; {valid}")
        if int(os.environ["WORLD_SIZE"]) > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    found = all_ranks()
    if found is None:
        raise Refused(f"{asked}: this process is the only one of its group; {valid}")
    return found


def all_ranks() -> Ranks | None:
    """All ranks of this process's group; None where it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    group = dist.group.WORLD
    return None if group is None else Ranks.of(group)
