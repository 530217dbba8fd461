"""Which calls of a denoiser are steps of one denoising loop.

A loop goes on while timesteps move forward, see `LoopPosition`. Within it, a track is the calls that see the same
conditions in step after step: a pipeline that calls the denoiser apart with and without the prompt has two.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from accel.diffusion.step_cache.features import Features
from accel.fusion.loop import DenoisingLoop

Clock = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LoopPosition:
    """Where in a denoising loop a call is, told without reading a GPU if possible.

    value: of the timestep, if it is a number or on the CPU; the largest where each token has its own. storage, offset:
    where the timestep lies in memory. clock: steps made by the schedulers of an announced loop. unread: a timestep on a
    GPU, to be read only if nothing else tells.
    """

    value: float | None = None
    storage: tuple[int, int | None] | None = None
    offset: int | torch.SymInt = 0
    clock: Clock | None = None
    unread: torch.Tensor | None = None
    held: torch.Tensor | None = None  # so that no other timestep takes its place in memory

    @classmethod
    def of(cls, timestep: object, clock: Clock | None = None, reads: bool = False) -> "LoopPosition":
        if isinstance(timestep, int | float) and not isinstance(timestep, bool):
            return cls(float(timestep), clock=clock)
        if type(timestep) is not torch.Tensor or not timestep.numel():
            return cls(clock=clock)
        value = _value(timestep) if timestep.device.type == "cpu" else None
        storage = timestep.untyped_storage().data_ptr(), version(timestep)
        unread = timestep if reads and timestep.is_cuda else None
        return cls(value, storage, timestep.storage_offset(), clock, unread, timestep)

    def follows(self, before: "LoopPosition") -> bool | None:
        """True: a later step of the same loop. False: the same step. None: another loop, or not known."""
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


PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class StepArguments:
    """Names of a denoiser's arguments by what they mean.

    sample: a tensor, or lists of tensors. conditions: the same tensors in every step; they tell calls of one step
    apart. others: further samples, of which only the shapes matter. reads: whether a timestep may be read from a GPU,
    where nothing else tells whether a loop goes on.
    """

    sample: str
    timestep: str
    conditions: tuple[str, ...]
    others: tuple[str, ...] = ()
    reads: bool = False

    def samples(self, given: dict) -> list:
        return pytree.tree_leaves(given.get(self.sample))

    def unfit(self, given: dict) -> str | None:
        """Why it is not known what this call depends on."""
        for leaf in self.samples(given) or [None]:
            if type(leaf) is not torch.Tensor:
                return f"a sample of type {type(leaf).__name__}"
        for name in (*self.conditions, *self.others):
            for leaf in pytree.tree_leaves(given.get(name)):
                if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                    return f"{name} holds a {type(leaf).__name__}, which may change from step to step"
        return None

    def conditions_of(self, given: dict) -> tuple[tuple, tuple[torch.Tensor, ...]]:
        """A key for calls that belong together, and the tensors that are to be held while it is used."""
        leaves, structure = pytree.tree_flatten([given.get(name) for name in self.conditions])
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        places = tuple((_place(leaf) if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves)
        return (self.shapes(given), structure, places), tensors

    def shapes(self, given: dict) -> tuple:
        """Shapes of all arguments that decide the size of features."""
        names = (self.sample, *self.others, *self.conditions)
        leaves = pytree.tree_leaves([given.get(name) for name in names])
        return tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _place(tensor: torch.Tensor) -> tuple:
    """Which elements a tensor shows; equal for views that are made anew in every step."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor), version(tensor)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), version(tensor)


MOST_TRACKS = 8  # at once; each keeps features in memory


@dataclass
class Track:
    """The calls of a loop that belong together, and when the next is to be computed whole.

    conditions: held, so that no other tensor takes their identity. seen, whole: the steps of the last call and of the
    last whole one. gap: steps between the last two whole ones. features: what is kept for it.
    """

    slot: int
    conditions: tuple[torch.Tensor, ...]
    seen: int
    whole: int | None = None
    gap: int | None = None
    features: Features | None = None

    def due(self, step: int, interval: int) -> bool:
        return self.whole is None or step - self.whole >= interval

    def beyond(self, step: int) -> float:
        """Where this step lies on the line through the last two whole ones, see `Features.extrapolate_to`."""
        return 1.0 if self.whole is None or self.gap is None else 1 + (step - self.whole) / self.gap

    def computed_whole(self, step: int) -> None:
        self.gap = None if self.whole is None else step - self.whole
        self.whole = step


class Tracks:
    """The tracks of the loop that a denoiser is in, for one thread; every doubt starts a new loop.

    `find(given)` gives the track of a call, or None where there are too many; `reason` then says why the call gains
    nothing. Each track of a loop has a slot, numbered from 0, which a track of the next loop takes over.
    """

    def __init__(self, loop: DenoisingLoop, arguments: StepArguments):
        self.loop, self.arguments = loop, arguments
        self.number = loop.number
        self.forget()

    def forget(self) -> None:
        self.moment: LoopPosition | None = None
        self.step = 0
        self.tracks: dict[tuple, Track] = {}
        self.calls: Counter[tuple] = Counter()  # in this step, by conditions

    def find(self, given: dict) -> tuple[Track | None, str | None]:
        reason = self._tick(LoopPosition.of(given.get(self.arguments.timestep), self.loop.clock, self.arguments.reads))
        key, conditions = self.arguments.conditions_of(given)
        self.calls[key] += 1
        key = key, self.calls[key]  # equal arguments in one step are not steps: tiles of an image, for one
        track = self.tracks.get(key)
        if track is None:
            slots = set(range(MOST_TRACKS)) - {other.slot for other in self.tracks.values()}
            if not slots:
                return None, f"more than {MOST_TRACKS} calls a step with conditions of their own"
            if self.step and self.calls.total() == 1:
                reason = "the conditions (prompt) are other tensors than in the step before"
            track = self.tracks[key] = Track(min(slots), conditions, self.step)
        track.seen = self.step
        return track, reason

    def _tick(self, moment: LoopPosition) -> str | None:
        """Moves on to the step or the loop of this call; returns why each call looks like a loop of its own, if so."""
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

    def _restart(self, moment: LoopPosition) -> None:
        self.forget()
        self.moment = moment
