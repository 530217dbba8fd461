"""Stock's loop waits after each token to learn whether all rows have ended. Here it learns that a step late.

The step that was made in vain is undone by stock's own code, which has such a check for devices of Apple.
"""

from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, StoppingCriteriaList

from accel.libraries.code import comes_from
from accel.libraries.generation import BEAMS, PREPARE, STEPS, WhisperNoSpeechDetection, loop_that_asks
from accel.llm.generation.loop.choice import PURE, RandomState
from accel.llm.generation.loop.token_loop import AT_ONCE, BY_TOKENS
from accel.seq2seq.timestamps import TimestampRule

# They may be called once more than by stock.
HARMLESS = (*PURE, TimestampRule, NoRepeatNGramLogitsProcessor, WhisperNoSpeechDetection)


class Told(NamedTuple):
    """Whether all rows have ended: on the host once `ready`. random: the generator's mark behind this token."""

    ended: torch.Tensor
    ready: torch.cuda.Event | None
    random: tuple


class LateStopCheck:
    """Made and called by stock's loop, as its own check."""

    told: Told | None = None
    steps = 0  # to undo

    def __init__(self, input_ids: torch.Tensor, max_length: int | None, cache: Any, returned: bool, *_: Any):
        self.most, self.cache = max_length, cache if returned else None
        self.random = RandomState(input_ids.device)
        self.stream = torch.cuda.current_stream(input_ids.device) if input_ids.is_cuda else None
        pinned = input_ids.is_cuda
        self.host = [torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=pinned) for _ in range(2)]

    @staticmethod
    def is_supported(device: torch.device, cache: Any, returned: bool, *_: Any, **__: Any) -> bool:
        return cache is None or cache.is_croppable or not returned

    def __call__(self, unfinished: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        ended = self.host[length % 2]
        ended.copy_(unfinished.max() == 0, non_blocking=True)
        ready = None if self.stream is None else self.stream.record_event()
        before, self.told = self.told, Told(ended, ready, self.random.mark())
        if before is not None:
            if before.ready is not None:
                before.ready.synchronize()
            if before.ended:
                self.random.set(before.random)
                self.steps = 1
        return self.steps > 0 or (self.most is not None and length >= self.most)

    def finish(self) -> int:
        if self.steps and self.cache is not None:
            self.cache.crop(-self.steps)
        return self.steps


LATE_LOOP = loop_that_asks(LateStopCheck)


def unseen(model: Any, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether no code of the user's runs between two steps of stock's loop, so nobody sees that one more is made."""
    known = all(type(one) in HARMLESS for one in processors) and all(
        type(one) in (*BY_TOKENS, *AT_ONCE) for one in criteria
    )
    own = {PREPARE, *STEPS, BEAMS} & vars(model).keys() or not comes_from(type(model), "transformers")
    return known and not (own or vars(model)["_forward_hooks"] or vars(model)["_forward_pre_hooks"])
