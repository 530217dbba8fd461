"""Which calls of a denoiser are steps of one denoising loop.

A loop goes on while timesteps move forward, see `moment.py`. Within it, a track is the calls that see the same
conditions in step after step: a pipeline that calls the denoiser apart with and without the prompt has two.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from accel.diffusion.step_cache.arguments import StepArguments
from accel.diffusion.step_cache.features import Features
from accel.diffusion.step_cache.moment import Moment
from accel.fusion.loop import Loop

MOST_TRACKS = 8  # at once; each keeps features in memory


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
    """The tracks of the loop that a denoiser is in, as one thread calls it; every doubt starts a new one.

    `find(given)` gives the track of a call, or None where there are too many; `reason` then says why the call gains
    nothing. Tracks of a loop have lanes of their own, numbered from 0, which those of the next loop take over.
    """

    def __init__(self, loop: Loop, arguments: StepArguments):
        self.loop, self.arguments = loop, arguments
        self.number = loop.number
        self.forget()

    def forget(self) -> None:
        self.moment: Moment | None = None
        self.step = 0
        self.tracks: dict[tuple, Track] = {}
        self.calls: Counter[tuple] = Counter()  # in this step, by conditions

    def find(self, given: dict) -> tuple[Track | None, str | None]:
        reason = self._tick(Moment.of(given.get(self.arguments.timestep), self.loop.clock, self.arguments.reads))
        key, conditions = self.arguments.conditions_of(given)
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
