"""Which calls of a UNet are steps of one denoising loop, told without reading anything from a GPU.

A loop goes on while timesteps move forward: through the scheduler's tensor, or down in value where that can be read for
free. Within it, a track is the calls that see the same conditions in step after step: a pipeline that calls the UNet
apart with and without the prompt has two.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from accel.diffusion.step_cache.features import Features
from accel.fusion.loop import Loop

MOST_TRACKS = 8  # at once; each keeps features in memory
CONDITIONS = ("encoder_hidden_states", "class_labels", "added_cond_kwargs")  # the same tensors in every step of a loop


@dataclass(frozen=True)
class Moment:
    """Where in a loop a call is: the timestep's value if it is a number or on the CPU, and where it lies in memory."""

    value: float | None = None
    storage: tuple[int, int | None] | None = None
    offset: int | torch.SymInt = 0

    @classmethod
    def of(cls, timestep: object) -> "Moment":
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            return cls(float(timestep))
        if type(timestep) is not torch.Tensor or not timestep.numel():
            return cls()
        value = float(timestep.reshape(-1)[0]) if timestep.device.type == "cpu" else None
        storage = timestep.untyped_storage().data_ptr(), version(timestep)
        return cls(value, storage, timestep.storage_offset())

    def follows(self, before: "Moment") -> bool | None:
        """True: a later step of the same loop; False: the same step; None: another loop, or who knows."""
        together = self.storage is not None and self.storage == before.storage
        if together and self.offset != before.offset:
            return True if self.offset > before.offset else None
        if self.value is not None and before.value is not None:
            return self.value < before.value if self.value <= before.value else None
        return False if together else None


@dataclass
class Track:
    """The calls of a loop that belong together, and when the next is to be computed whole.

    conditions: held, so that no other tensor takes their identity. seen, whole: the steps of the last call and of the
    last whole one; gap: steps between the last two whole ones. features: what the caller keeps for it.
    """

    lane: int
    conditions: tuple[torch.Tensor, ...]
    seen: int
    whole: int | None = None
    gap: int | None = None
    features: Features | None = None

    def due(self, step: int, interval: int) -> bool:
        return self.whole is None or step - self.whole >= interval

    def beyond(self, step: int) -> float:
        """Where this step is on the line through the last two whole ones, see `Features.aim`."""
        return 1.0 if self.whole is None or self.gap is None else 1 + (step - self.whole) / self.gap

    def computed_whole(self, step: int) -> None:
        self.gap = None if self.whole is None else step - self.whole
        self.whole = step


class Tracks:
    """The tracks of the loop that a UNet is in, as one thread calls it; every doubt starts a new one.

    `find(arguments)` gives the track of a call, or None where there are too many; `reason` then says why the call gains
    nothing. Tracks of a loop have lanes of their own, numbered from 0, which those of the next loop take over.
    """

    def __init__(self, loop: Loop):
        self.loop = loop
        self.number = loop.number
        self.forget()

    def forget(self) -> None:
        self.moment: Moment | None = None
        self.step = 0
        self.tracks: dict[tuple, Track] = {}
        self.calls: Counter[tuple] = Counter()  # in this step, by conditions

    def find(self, arguments: dict) -> tuple[Track | None, str | None]:
        reason = self._tick(Moment.of(arguments.get("timestep")))
        key, conditions = _conditions(arguments)
        self.calls[key] += 1
        key = key, self.calls[key]  # equal arguments in one step are not steps: tiles of an image, for one
        track = self.tracks.get(key)
        if track is None:
            lanes = set(range(MOST_TRACKS)) - {other.lane for other in self.tracks.values()}
            if not lanes:
                return None, f"more than {MOST_TRACKS} calls a step with conditions of their own"
            if self.step and self.calls.total() == 1:
                reason = "the conditions (prompt) are other tensors than in the step before"
            track = self.tracks[key] = Track(min(lanes), conditions, self.step)
        track.seen = self.step
        return track, reason

    def _tick(self, moment: Moment) -> str | None:
        """Moves on to the step or the loop of this call; the reason where each call looks like a loop of its own."""
        before, self.moment = self.moment, moment
        if self.number != self.loop.number:
            self.number = self.loop.number
            later = None
        else:
            later = None if before is None else moment.follows(before)
            if later is None and before is not None and self.step == 0:
                self._restart(moment)
                return "timesteps that are neither numbers nor elements of one tensor do not tell that a loop goes on"
        if later is None:
            self._restart(moment)
        elif later:
            self.tracks = {key: track for key, track in self.tracks.items() if track.seen == self.step}
            self.step += 1
            self.calls.clear()
        return None

    def _restart(self, moment: Moment) -> None:
        self.forget()
        self.moment = moment


def version(tensor: torch.Tensor) -> int | None:
    """How often the tensor was written to; None under inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def _conditions(arguments: dict) -> tuple[tuple, tuple[torch.Tensor, ...]]:
    sample = arguments["sample"]
    leaves = pytree.tree_leaves([arguments.get(name) for name in CONDITIONS])
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    identities = tuple((id(tensor), version(tensor)) for tensor in tensors)
    return (sample.shape, sample.dtype, sample.device, identities), tensors
