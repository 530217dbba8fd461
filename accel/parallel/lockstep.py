"""Ranks that take the same decisions one after the other: messages from the first rank to the others between two steps.

All numbers go through a gloo group over the CPU. So a step's launch does not wait for the device, and messages for the
next step travel while the device computes this one. NCCL would put each message behind the kernels.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from accel.errors import RanksApart, logged
from accel.parallel.agreement import by_value, patience
from accel.parallel.ranks import Ranks

Found = TypeVar("Found")


class Lockstep:
    """A channel by which ranks meet. Every rank makes one at the same place, and all meet equally often, by one thread.

    Each method raises `errors.RanksApart` where a rank does not come within the group's timeout, or has ended.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        group = dist.new_group(
            list(ranks.members), timeout=patience(ranks), backend="gloo", use_local_synchronization=True
        )
        self.group: dist.ProcessGroup | None = group
        self.channel = Ranks(group)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that others follow."""
        return self.ranks.rank == 0

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest of all ranks, of each of these whole numbers."""
        return self.channel.largest(torch.tensor(numbers, dtype=torch.int64, device="cpu")).tolist()

    def least(self, number: int) -> int:
        """The smallest of all ranks."""
        return -self.most([-number])[0]

    def broadcast(self, message: bytes, size: int) -> bytes:
        """The first rank's message. size: of it in bytes, which all ranks know."""
        heard = np.frombuffer(message, np.uint8).copy() if self.leads else np.empty(size, np.uint8)
        self.channel.first(torch.from_numpy(heard))
        return heard.tobytes()

    def reasons(self, own: str) -> str:
        """The reasons of all ranks that have one, with their numbers. own: of this one, or empty."""
        said: list[str | None] = [None] * self.ranks.size
        with self.channel.exchange():
            dist.all_gather_object(said, own, group=self.group)
        return "; ".join(f"rank {who}: {why}" for why, who in by_value(dict(enumerate(said))).items() if why)

    def all_do(self, what: str, call: Callable[[], Found]) -> Found:
        """call() on this rank. Raises on all ranks where it does on one of them; the error itself there."""
        found, failure = None, None
        try:
            found = call()
        except Exception as error:
            failure, reason = error, logged(error)
        if self.most([failure is not None])[0]:
            reasons = self.reasons("" if failure is None else reason)
            raise failure or RanksApart(f"{what}: {reasons}")
        return cast(Found, found)

    def close(self) -> None:
        """Gives the connections back. Any number of times."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
