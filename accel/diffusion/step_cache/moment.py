"""Where in a denoising loop a call is, told by its timestep, and without reading a GPU where that can be."""

from dataclasses import dataclass

import torch

Clock = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Moment:
    """One call's place. value: the timestep's, if it is a number or on the CPU; the largest where tokens have theirs.
    storage, offset: where the timestep lies in memory. clock: how far the schedulers of an announced loop are.
    unread: the timestep, where its value may be read from a GPU if nothing else tells.
    """

    value: float | None = None
    storage: tuple[int, int | None] | None = None
    offset: int | torch.SymInt = 0
    clock: Clock | None = None
    unread: torch.Tensor | None = None
    held: torch.Tensor | None = None  # so that no other timestep takes its place in memory

    @classmethod
    def of(cls, timestep: object, clock: Clock | None = None, reads: bool = False) -> "Moment":
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            return cls(float(timestep), clock=clock)
        if type(timestep) is not torch.Tensor or not timestep.numel():
            return cls(clock=clock)
        value = _value(timestep) if timestep.device.type == "cpu" else None
        storage = timestep.untyped_storage().data_ptr(), version(timestep)
        unread = timestep if reads and timestep.is_cuda else None
        return cls(value, storage, timestep.storage_offset(), clock, unread, timestep)

    def follows(self, before: "Moment") -> bool | None:
        """True: a later step of the same loop; False: the same step; None: another loop, or who knows."""
        together = self.storage is not None and self.storage == before.storage
        if together and self.offset != before.offset:
            return True if self.offset > before.offset else None
        if self.value is not None and before.value is not None and self.value <= before.value:
            return self.value < before.value
        if together and self.value is None:
            return False
        if self.clock is not None and before.clock is not None:
            return self.clock > before.clock if self.clock >= before.clock else None
        if self.unread is not None and before.unread is not None:
            value, former = _value(self.unread), _value(before.unread)
            return value < former if value <= former else None
        return None


def version(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written to; None under inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _value(timestep: torch.Tensor) -> float:
    return float(timestep.max())
