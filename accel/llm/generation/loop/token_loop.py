"""Steps of generate() one after another without waiting for their tokens: the host reads them a step late.

Stock's loop asks after every token whether all rows have ended, which waits for the GPU; then the GPU waits for Python.
Here the next step is launched first. It needs nothing from the host: the token is on the GPU, and what else a step is
given follows from the step before. A step launched after the end is dropped: the cache goes back to the length before
it, and the random generator to its state. What the step wrote lies beyond that length, where the next token overwrites
it before it is read.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import transformers
from accel_kernels import argmax, ended_tokens
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from accel.errors import Unfit
from accel.libraries.generation import PAD_TENSOR
from accel.llm.generation.loop.choice import RandomState, draw, refuse_nan

UNWATCHED = 16  # steps from one check of the model to the next, where no code of others runs in between
# Criteria that may be evaluated a step late. The first are functions of the tokens, which the GPU computes in the step;
# the others end all rows at once, by the shape of the tokens or the clock.
BY_TOKENS = (transformers.EosTokenCriteria, transformers.StopStringCriteria)
AT_ONCE = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria)


class Token(NamedTuple):
    """One token a row, being copied from the GPU.

    ids: (rows, tokens so far), with it. last: (rows, 1), the token, contiguous. unfinished: (rows,) int64, 1 where a
    row goes on, as far as the GPU knows. host: (2 or 3, rows) int64 on the host once `ready`: the tokens, `unfinished`,
    and whether they were drawn from NaN. stored: the length of the store with the step that chose it. random: the
    generator before it was drawn.
    """

    ids: torch.Tensor
    last: torch.Tensor
    unfinished: torch.Tensor
    host: torch.Tensor | None = None
    ready: torch.cuda.Event | None = None
    stored: int = 0
    random: tuple | None = None

    def read(self) -> tuple[torch.Tensor, bool]:
        """(rows,) int64 on the host, and whether any row goes on; waits. Raises RuntimeError for NaN, as torch does."""
        if self.ready is not None:
            self.ready.synchronize()
        assert self.host is not None
        if len(self.host) > 2 and bool(self.host[2].any()):
            refuse_nan()
        return self.host[0], bool(self.host[1].any())


class GenerateRequest(NamedTuple):
    """What one generate() call asks for. kwargs: of the model, as prepared for the prompt."""

    config: GenerationConfig
    kwargs: dict[str, Any]
    processors: LogitsProcessorList
    streamer: Any = None


class TokenLoop(ABC):
    """The rest of one generate() call, whose model continues what its cache holds.

    ids: (rows, so far), all tokens; unfinished: (rows,) int64, 1 where a row goes on; stored: tokens of the cache, all
    but the last of ids. `run` gives all tokens, (rows, in the end).
    """

    def __init__(
        self,
        request: GenerateRequest,
        criteria: StoppingCriteriaList,
        ids: torch.Tensor,
        unfinished: torch.Tensor,
        stored: int,
    ) -> None:
        self.request, self.criteria, self.streamer = request, criteria, request.streamer
        self.first = Token(ids, ids[:, -1:].clone(memory_format=torch.contiguous_format), unfinished)
        self.ahead: Token | None = None  # launched before the token in front of it was read
        self.stored = stored  # of what counts
        self.random = RandomState(ids.device) if request.config.do_sample else None
        ends = any(hasattr(one, "eos_token_id") for one in criteria)
        self.pads = ends and ids.shape[0] > 1  # a single row that has ended is never continued
        self.pad = getattr(request.config, PAD_TENSOR)
        self.pad = self.pad.to(ids.device) if self.pads and self.pad is not None else None
        self.max_length = criteria.max_length
        self.late = all(type(one) in (*BY_TOKENS, *AT_ONCE) for one in criteria)
        stops = [one for one in criteria if type(one) in BY_TOKENS]
        eos = [one.eos_token_id.reshape(-1) for one in stops if isinstance(one, transformers.EosTokenCriteria)]
        self.eos = torch.cat([one.to(ids) for one in eos]) if eos else None
        self.by_tokens = [one for one in stops if not isinstance(one, transformers.EosTokenCriteria)]
        self.at_once = [one for one in criteria if type(one) in AT_ONCE]
        self.blank = torch.zeros(1, 1, dtype=torch.long, device="cpu")

    @abstractmethod
    def logits(self, token: Token) -> torch.Tensor:
        """(rows, 1, vocabulary) for the token behind this one. Raises Unfit where the model is to be called."""

    def choose(self, token: Token) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `ended_tokens` gives it, (2, rows) int64; and (rows,) bool, whether a row was drawn from NaN."""
        logits = self.logits(token)
        scores, wrong = logits[:, -1].to(device=token.ids.device), None
        if self.random is not None or self.request.processors:
            scores = scores.to(copy=True, dtype=torch.float32)
        for process in self.request.processors:
            scores = process(token.ids, scores)
        if self.random is None:
            chosen = argmax(scores)
        else:
            chosen, wrong = draw(nn.functional.softmax(scores, dim=-1))
        return ended_tokens(chosen, token.unfinished, self.eos if self.late else None, self.pad), wrong

    @abstractmethod
    def length(self) -> int:
        """Tokens that the cache holds."""

    @abstractmethod
    def crop(self) -> None:
        """Leaves in the cache what is stored, where it holds more."""

    def around(self) -> AbstractContextManager:
        """Inside is the loop."""
        return nullcontext()

    def call_the_model(self) -> None:
        """From now on, as the forward alone finds no way."""
        self.late = False

    @abstractmethod
    def look(self) -> None:
        """After code of the user's."""

    def stream(self, chosen: torch.Tensor) -> None:
        """Gives the streamer a token, (rows,) int64 on the host."""
        self.streamer.put(chosen)

    def run(self) -> torch.Tensor:
        device = self.first.ids.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), self.around():
            try:
                return self._run(self.first)
            finally:
                self.drop()

    def _run(self, token: Token) -> torch.Tensor:
        while True:
            token, self.ahead = self.ahead or self._wanted(token), None
            self.stored = token.stored
            if self.late and (self.max_length is None or token.ids.shape[1] < self.max_length):
                self._begin(token)
            try:
                chosen, goes_on = token.read()
            except RuntimeError:
                self.drop()
                self.go_back(token.random)
                raise
            if self.late:
                ended = self._over(token.ids.shape[1]) or not goes_on
            else:
                unfinished = token.unfinished & ~self.criteria(token.ids, None)
                # What was chosen may have been overwritten by a criterion, which is shown stock's own tensor too.
                last = token.ids[:, -1:].clone(memory_format=torch.contiguous_format)
                token, ended = token._replace(last=last, unfinished=unfinished), bool(unfinished.max() == 0)
                self.look()
            if self.streamer is not None:
                self.stream(chosen)
            if ended:
                return token.ids

    def _wanted(self, token: Token) -> Token:
        try:
            return self._next(token)
        except Unfit:  # the call of the model finds the same, and reports it
            self.call_the_model()
            return self._next(token)

    def _next(self, token: Token) -> Token:
        """Launches the step that takes the last token, and the choice of one more."""
        random = None if self.random is None else self.random.mark()
        found, wrong = self.choose(token)
        last, unfinished = found[0, :, None], found[1]
        ids = torch.cat([token.ids, last], dim=-1)
        for one in self.by_tokens if self.late else ():
            unfinished = unfinished & ~one(ids, None)
            found[1] = unfinished
        if wrong is not None:
            found = torch.cat((found, wrong.long()[None]))
        host = found.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.current_stream().record_event() if found.is_cuda else None
        return Token(ids, last, unfinished, host, ready, self.length(), random)

    def _begin(self, token: Token) -> None:
        """Launches the next step before the last token is read."""
        random = None if self.random is None else self.random.mark()
        try:
            self.ahead = self._next(token)
        except BaseException as error:
            self.go_back(random)
            if not isinstance(error, Exception):
                raise
            self.late = False  # the error comes again if the step is still wanted after the token before it

    def drop(self) -> None:
        """Undoes the step launched ahead."""
        ahead, self.ahead = self.ahead, None
        self.go_back(None if ahead is None else ahead.random)

    def go_back(self, random: tuple | None) -> None:
        self.crop()
        if self.random is not None and random is not None:
            self.random.set(random)

    def _over(self, length: int) -> bool:
        """Whether all rows end at so many tokens, or now. These criteria read only the shape of the ids."""
        ids = self.blank.expand(1, length)
        return any([bool(one(ids, None)) for one in self.at_once])
