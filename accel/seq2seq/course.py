"""How steps follow each other: what need not be looked at again, and in which order streams use the memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel.errors import Unfit
from accel.libraries.cache import ENCODED, ENCODER_MASK, MASK, POSITIONS, TOKENS
from accel.llm.generation.loop.token_loop import UNWATCHED
from accel.seq2seq.fixed_memory import OWN, Holding
from accel.seq2seq.step_inputs import TextStep


class Course(threading.local):
    """A loop that this thread is in, of known code alone, so that nothing but other threads can change the model.

    left: steps to come in which the model is not compared, None outside of such a loop. place: the cache of the step
    before, and the memory that it is in; replayed: the kind of a step, and the key of its
    replay. given: what its call was given; step: what that stood for.
    """

    left: int | None = None
    place: tuple[Any, Any] = (None, None)
    replayed: tuple[Any, tuple | None] = (None, None)
    given: dict[str, Any]
    step: TextStep

    def begin(self) -> bool:
        """A step. Returns whether it goes without a look at the model."""
        if self.left is None:
            return False
        unseen, self.left = self.left > 0, self.left - 1 if self.left else UNWATCHED
        return unseen

    def note(self, cache: Any, holding: Holding, given: dict[str, Any], step: TextStep) -> None:
        """A step that has been looked at. given: the keywords of its call."""
        if self.left is not None:
            self.place, self.given, self.step = (cache, holding), given, step

    def next(self, cache: Any, holding: Holding | None, given: dict[str, Any]) -> TextStep | None:
        """The step that a call stands for, which differs from the one before in its token alone; else None."""
        if holding is None or self.place[0] is not cache:
            return None
        same = all(given.get(name) is self.given.get(name) for name in (ENCODED, ENCODER_MASK, MASK, POSITIONS))
        return self.after(cache, holding, given[TOKENS]) if same else None

    def after(self, cache: Any, holding: Holding | None, tokens: torch.Tensor) -> TextStep | None:
        """The same, of a call that is known to differ in its token alone."""
        if holding is None or self.place[0] is not cache or self.place[1] is not holding:
            return None
        start, told = holding.lengths[OWN], any(self.given.get(name) is not None for name in (MASK, POSITIONS))
        if told or start >= self.step.rooms[OWN] or tokens.shape != self.step.given.tokens.shape:
            return None
        return self.step.after(tokens, start)

    def end(self) -> None:
        self.left, self.place, self.replayed, self.given = None, (None, None), (None, None), {}
        vars(self).pop("step", None)


class StreamOrder:
    """Threads have streams of their own, which wait for each other. done: event behind the last use of a memory."""

    done: Any = None

    @contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """Inside, the memory is as the last use of it has left it. Raises Unfit."""
        if device.type != "cuda":
            yield
            return
        if torch.cuda.is_current_stream_capturing():
            raise Unfit("part of somebody's capture")
        stream = torch.cuda.current_stream(device)
        if self.done is not None:
            stream.wait_event(self.done)
        try:
            yield
        finally:
            self.done = stream.record_event()
