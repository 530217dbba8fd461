"""Stock's loop waits after each token to learn whether all rows have ended. Here it learns that a step late.

The step that was made in vain is undone by stock's own code, which has such a check for devices of Apple.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, StoppingCriteriaList

from accel.libraries.cache import filled_layers
from accel.libraries.code import comes_from
from accel.libraries.generation import BEAMS, PREPARE, STEPS, WhisperNoSpeechDetection, loop_that_asks
from accel.llm.generation.loop.choice import PURE, RandomState
from accel.llm.generation.loop.token_loop import AT_ONCE, BY_TOKENS
from accel.patching.structure import foreign_hooks
from accel.seq2seq.processors import FirstRow, Suppressed, TimestampRule

# They may be called once more than by stock.
HARMLESS = (*PURE, FirstRow, Suppressed, TimestampRule, NoRepeatNGramLogitsProcessor, WhisperNoSpeechDetection)


class Told(NamedTuple):
    """Whether all rows have ended: on the host once `ready`. random: the generator's mark behind this token."""

    ended: torch.Tensor
    ready: torch.cuda.Event | None
    random: tuple

    def read(self) -> bool:
        """Waits for it."""
        if self.ready is not None:
            self.ready.synchronize()
        return bool(self.ended)


class Teller:
    """Has the host told, as soon as the device knows. like: a tensor on the device; dtype: of what is told."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype = torch.bool):
        self.random = RandomState(like.device)
        self.stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        self.host = [torch.zeros((), dtype=dtype, device="cpu", pin_memory=like.is_cuda) for _ in range(2)]

    def __call__(self, ended: torch.Tensor, number: int) -> Told:
        """number: of the step; what was told two steps before is gone."""
        into = self.host[number % 2].copy_(ended, non_blocking=True)
        return Told(into, None if self.stream is None else self.stream.record_event(), self.random.mark())


class LateStopCheck:
    """Made and called by stock's loop, as its own check."""

    told: Told | None = None
    steps = 0  # to undo

    def __init__(self, input_ids: torch.Tensor, max_length: int | None, cache: Any, returned: bool, *_: Any):
        self.most, self.cache, self.tell = max_length, cache if returned else None, Teller(input_ids)

    @staticmethod
    def is_supported(device: torch.device, cache: Any, returned: bool, *_: Any, **__: Any) -> bool:
        # Of a window, stock's crop knows what it has dropped only where it was told to keep that.
        cut = filled_layers(cache) is not None and not any(cache.is_sliding)
        return cache is None or cut or not returned

    def __call__(self, unfinished: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        before, self.told = self.told, self.tell(unfinished.max() == 0, length)
        if before is not None and before.read():
            self.tell.random.set(before.random)
            self.steps = 1
        return self.steps > 0 or (self.most is not None and length >= self.most)

    def finish(self) -> int:
        if self.steps and self.cache is not None:
            self.cache.crop(-self.steps)
        return self.steps


class ModelView:
    """A model as one of stock's loops sees it, for which some methods are others."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


LATE_LOOP = loop_that_asks(LateStopCheck)


def unseen(model: Any, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether no code of the user's runs between two steps of stock's loop, so nobody sees that one more is made."""
    known = all(type(one) in HARMLESS for one in processors) and all(
        type(one) in (*BY_TOKENS, *AT_ONCE) for one in criteria
    )
    own = {PREPARE, *STEPS, BEAMS} & vars(model).keys() or not comes_from(type(model), "transformers")
    hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return known and not (own or hooks or any(map(foreign_hooks, model.modules())))
