"""Stock's loop waits after each token to learn whether all rows have ended. Here it learns that a step late.

The step that was made in vain is undone by stock's own code, which has such a check for devices of Apple.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as torch_module
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, StoppingCriteriaList

from accel.libraries.cache import filled_layers
from accel.libraries.code import comes_from
from accel.libraries.generation import AS_IMPORTED, BEAMS, PREPARE, STEPS, WhisperNoSpeechDetection, loop_that_asks
from accel.llm.generation.loop.choice import PURE, RandomState
from accel.llm.generation.loop.token_loop import AT_ONCE, BY_TOKENS
from accel.patching.structure import foreign_hooks
from accel.seq2seq.processors import FirstRow, Suppressed, TimestampRule

RESULT = ("sequences", "beam_scores", "beam_indices", "is_sent_finished")  # of beams, as one step hands them on
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


class LateBeams(ModelView):
    """A model as stock's loop of beams sees it, which is told that it has ended when it has launched one step more.

    What that step finds is dropped where it would become the result.
    """

    told: Told | None = None
    over = False

    def __init__(self, model: Any, ids: torch.Tensor, most: int):
        super().__init__(model)
        self.left, self.tell = most - ids.shape[1], Teller(ids)

    def _update_finished_beams(self, **given: Any) -> tuple:
        if self.told is None or not self.told.read():
            return self.updated(given)
        self.over = True
        return tuple(given[name] for name in RESULT)

    def updated(self, given: dict[str, Any]) -> tuple:
        return self.model._update_finished_beams(**given)

    def _beam_search_has_unfinished_sequences(self, *args: Any) -> bool:
        goes_on = self.goes_on(*args)
        self.left -= 1
        self.told = self.tell(~goes_on, self.left)
        return not self.over and self.left > 0

    def goes_on(self, *args: Any) -> torch.Tensor:
        """Whether any text does, () bool."""
        return self.model._beam_search_has_unfinished_sequences(*args)


def beams_late(model: Any, input_ids: torch.Tensor, *, generation_config: Any, **kwargs: Any) -> torch.Tensor:
    """Stock's loop of beams, of a call that gives tokens alone."""
    view = LateBeams(model, input_ids, generation_config.max_length)
    return AS_IMPORTED[BEAMS](view, input_ids, generation_config=generation_config, **kwargs)


LATE_LOOP = loop_that_asks(LateStopCheck)


def beams_may_be_late(config: Any, criteria: StoppingCriteriaList, cache: Any) -> bool:
    """Whether a call of beams gives tokens alone, and this version's loop goes by the methods above.

    A draw of one step more might find too few candidates left; and stock's loop raises where a text grows too long.
    """
    asked = {name for name in vars(LateBeams) if name.startswith("_") and not name.startswith("__")}
    known = asked <= {*AS_IMPORTED[BEAMS].__code__.co_names}
    seen = config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    longer = (criteria.max_length or 0) > config.max_length
    return known and not (config.do_sample or seen or longer)


def unseen(model: Any, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
    """Whether no code of the user's runs between two steps of stock's loop, so nobody sees that one more is made."""
    known = all(type(one) in HARMLESS for one in processors) and all(
        type(one) in (*BY_TOKENS, *AT_ONCE) for one in criteria
    )
    own = {PREPARE, *STEPS, BEAMS} & vars(model).keys() or not comes_from(type(model), "transformers")
    hooks = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return known and not (own or hooks or any(map(foreign_hooks, model.modules())))
