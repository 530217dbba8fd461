"""Steps of generate() one after another without waiting for their tokens: the host reads them a step late.

Stock's loop asks after every token whether all rows have ended, which waits for the GPU; then the GPU waits for Python.
Here the next step is launched first. It needs nothing from the host: the token is on the GPU, positions advance by one,
the mask by a 1. A step launched after the end, or after a change of the model, is dropped: the store goes back to the
length before it, and the random generator to its state. What the step wrote lies beyond the stored length, where the
next token overwrites it before it is read.

Others see what stock shows them: criteria, then the streamer, token by token. Criteria of the user's run before the
next step is launched, since they may change it. While a streamer runs, the step ahead is undone: cache and random
generator are as in stock. It is put back unless the streamer has changed these or the model. Without a streamer only
other threads run in between, and the model is checked every few steps.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from accel_kernels import argmax, ended_tokens
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.errors import RanksApart, Unfit
from accel.libraries.cache import generating_cache
from accel.libraries.generation import PAD_TENSOR, PREPARE, next_inputs, predictable
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.choice import RandomState, draw, refuse_nan
from accel.llm.generation.prefill import by_graph
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.pending_step import LatestForward
from accel.llm.kv_cache.store import Store
from accel.llm.pipeline.stretch import StretchGraphs
from accel.offload.call_hooks import streamed_model
from accel.patching.owner import InstanceMethod


def next_logits(
    forward: DecoderForward,
    store: Store,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    keep: int,
    trusted: bool,
) -> torch.Tensor:
    """The logits of one more token a row, (rows, 1, vocabulary), which is stored.

    tokens: (rows, 1). positions: one further than before. The mask advances by a 1; the store has the rest of it.
    keep: as before. trusted: the graph of the step before is replayed without comparing the model. Raises Unfit.
    """
    rows = tokens.shape[0]
    store.reserve(rows, store.length + 1)
    eager, arguments = partial(forward.eager, store, False), (tokens, positions, store.metadata, keep)
    variant = ("mask",) if store.padding_mask is not None else ()
    if isinstance(forward.runner, StretchGraphs) and tokens.is_cuda and by_graph(rows, 1):
        logits: Any = forward.runner(eager, arguments, {}, variant, trusted=trusted)
    elif forward.runner is not None and tokens.is_cuda and by_graph(rows, 1):
        replayed = forward.runner.begin(arguments, {}, variant) if trusted else None
        logits = forward.runner(eager, arguments, {}, variant) if replayed is None else replayed.outputs
    else:
        logits = eager(*arguments)
    store.advance(1)
    store.latest = LatestForward(positions, keep)
    return logits


def fingerprint_of(forward: DecoderForward) -> Fingerprint | None:
    """The model as it was when its graphs were captured, or its layers bound where it has none."""
    graphs = None if forward.runner is None else forward.runner.fingerprint
    return forward.seen if graphs is None else graphs


TOUCHED = (
    "a streamer has changed the model, its cache or the random numbers while generate() ran, of which the other ranks "
    "that share the model know nothing"
)
UNWATCHED = 16  # steps from one check of the model to the next, where no code of others runs in between
# Criteria that may be evaluated a step late. The first are functions of the tokens, which the GPU computes in the step;
# the others end all rows at once, by the shape of the tokens or the clock.
BY_TOKENS = (transformers.EosTokenCriteria, transformers.StopStringCriteria)
AT_ONCE = (transformers.MaxLengthCriteria, transformers.MaxTimeCriteria)


def undisturbed(forward: DecoderForward) -> bool:
    """Whether calling the model only calls the forward: no hooks, loop or settings of others are in between."""
    model, attributes, placed = forward.module, vars(forward.module), streamed_model(forward.module)
    return (
        attributes.get("forward") is forward
        and predictable(model, forward.convention.prepared)
        and isinstance(attributes.get(PREPARE), InstanceMethod)  # our hook, which nobody has replaced
        and type(model).__call__ is nn.Module.__call__
        and not (attributes["_forward_pre_hooks"] or attributes["_forward_hooks"])
        and (placed is None or placed.still)
        and forward.mode() is None
    )


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
    streamer: Any


class TokenLoop:
    """The rest of one generate() call. `store`: its cache; `store.latest`: the forward that the last token came of.

    ids: (rows, so far), all tokens; unfinished: (rows,) int64, 1 where a row goes on; prompt: tokens of a row when
    generate() began. `run` gives all tokens, (rows, in the end).
    """

    def __init__(
        self,
        forward: DecoderForward,
        store: Store,
        request: GenerateRequest,
        criteria: StoppingCriteriaList,
        ids: torch.Tensor,
        unfinished: torch.Tensor,
        prompt: int,
    ) -> None:
        self.forward, self.model, self.store, self.prompt = forward, forward.module, store, prompt
        self.request, self.criteria, self.streamer = request, criteria, request.streamer
        assert store.latest is not None
        self.keep, self.positions, self.start = store.latest.keep, store.latest.positions, ids.shape[1]
        self.first = Token(ids, ids[:, -1:].clone(memory_format=torch.contiguous_format), unfinished)
        self.ahead: Token | None = None  # launched before the token in front of it was read
        self.stored = store.length  # of what counts
        self.random = RandomState(ids.device) if request.config.do_sample else None
        ends = any(hasattr(one, "eos_token_id") for one in criteria)
        self.pads = ends and ids.shape[0] > 1  # a single row that has ended is never continued
        self.pad = getattr(request.config, PAD_TENSOR)
        self.pad = self.pad.to(ids.device) if self.pads and self.pad is not None else None
        self.max_length = criteria.max_length
        self.late = all(type(one) in (*BY_TOKENS, *AT_ONCE) for one in criteria)
        if forward.ranks is not None and self._state()[1] is None:
            self.late = False  # a streamer, which only one of them may have, would end it; all take equally many steps
        stops = [one for one in criteria if type(one) in BY_TOKENS]
        eos = [one.eos_token_id.reshape(-1) for one in stops if isinstance(one, transformers.EosTokenCriteria)]
        self.eos = torch.cat([one.to(ids) for one in eos]) if eos else None
        self.by_tokens = [one for one in stops if not isinstance(one, transformers.EosTokenCriteria)]
        self.at_once = [one for one in criteria if type(one) in AT_ONCE]
        self.blank = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        self.fused = True  # steps call the forward instead of the model
        self.trusted = 0  # steps to come in which the model is not compared
        self.placed = streamed_model(self.model)

    def run(self) -> torch.Tensor:
        device, placed = self.first.ids.device, self.placed
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            nullcontext() if placed is None else placed.one_call(),
        ):
            try:
                return self._run(self.first)
            finally:
                self._drop()
                self.store.latest = None

    def _run(self, token: Token) -> torch.Tensor:
        while True:
            token, self.ahead = self.ahead or self._wanted(token), None
            self.stored = token.stored
            if self.late and (self.max_length is None or token.ids.shape[1] < self.max_length):
                self._begin(token)
            try:
                chosen, goes_on = token.read()
            except RuntimeError:
                self._drop()
                self._go_back(token.random)
                raise
            if self.late:
                ended = self._over(token.ids.shape[1]) or not goes_on
            else:
                unfinished = token.unfinished & ~self.criteria(token.ids, None)
                token, ended = token._replace(unfinished=unfinished), bool(unfinished.max() == 0)
                self._look()
            if self.streamer is not None:
                self._stream(chosen)
            if ended:
                return token.ids

    def _wanted(self, token: Token) -> Token:
        try:
            return self._next(token)
        except Unfit:  # the call of the model finds the same, and reports it
            self.fused = self.late = False
            return self._next(token)

    def _next(self, token: Token) -> Token:
        """Launches the step that takes the last token, and the choice of one more."""
        random = None if self.random is None else self.random.mark()
        logits = self._logits(token)
        scores, wrong = logits[:, -1].to(device=token.ids.device), None
        if self.random is not None or self.request.processors:
            scores = scores.to(copy=True, dtype=torch.float32)
        for process in self.request.processors:
            scores = process(token.ids, scores)
        if self.random is None:
            chosen = argmax(scores)
        else:
            chosen, wrong = draw(nn.functional.softmax(scores, dim=-1))
        found = ended_tokens(chosen, token.unfinished, self.eos if self.late else None, self.pad)
        last, unfinished = found[0, :, None], found[1]
        ids = torch.cat([token.ids, last], dim=-1)
        for one in self.by_tokens if self.late else ():
            unfinished = unfinished & ~one(ids, None)
            found[1] = unfinished
        if wrong is not None:
            found = torch.cat((found, wrong.long()[None]))
        host = found.to("cpu", non_blocking=True)  # into pinned memory
        ready = torch.cuda.current_stream().record_event() if found.is_cuda else None
        return Token(ids, last, unfinished, host, ready, self.store.length, random)

    def _logits(self, token: Token) -> torch.Tensor:
        """(rows, 1, vocabulary) for the token behind this one."""
        ids = token.ids
        if self.placed is not None and self.placed.next_step():
            self.trusted = 0
        if self.fused:
            positions = None if self.positions is None else self.positions + (ids.shape[1] - self.start + 1)
            logits = next_logits(self.forward, self.store, token.last, positions, self.keep, self.trusted > 0)
            self.trusted = self.trusted - 1 if self.trusted else UNWATCHED
            return logits
        inputs = next_inputs(self.model, self.request.kwargs, ids, ids.shape[1] - self.prompt)
        return self.model(**inputs, return_dict=True).logits

    def _begin(self, token: Token) -> None:
        """Launches the next step before the last token is read."""
        random = None if self.random is None else self.random.mark()
        try:
            self.ahead = self._next(token)
        except BaseException as error:
            self._go_back(random)
            if not isinstance(error, Exception):
                raise
            self.late = False  # the error comes again if the step is still wanted after the token before it

    def _drop(self) -> None:
        """Undoes the step launched ahead."""
        ahead, self.ahead = self.ahead, None
        self._go_back(None if ahead is None else ahead.random)

    def _go_back(self, random: tuple | None) -> None:
        if self.store.consistent and self.store.length > self.stored:
            self.store.crop(self.stored)
        if self.random is not None and random is not None:
            self.random.set(random)

    def _over(self, length: int) -> bool:
        """Whether all rows end at so many tokens, or now. These criteria read only the shape of the ids."""
        ids = self.blank.expand(1, length)
        return any([bool(one(ids, None)) for one in self.at_once])

    def _stream(self, chosen: torch.Tensor) -> None:
        """Gives the streamer a token. The step ahead is undone meanwhile, and put back if the streamer changed neither
        the cache, the random numbers nor the model.
        """
        ahead, self.ahead = self.ahead, None
        after = None if self.random is None else self.random.mark()
        if ahead is not None:
            self._go_back(ahead.random)
        before = None if self.random is None else self.random.mark()
        known = self._state()
        untouched = self.store.latest = LatestForward(None, self.keep)  # any read or write of the store removes it
        self.streamer.put(chosen.clone())
        same = self.store.latest is untouched and (self.random is None or self.random.mark() == before)
        if ahead is not None and same and self._holds(known):
            self.store.advance(1)
            self.ahead = ahead
            if self.random is not None and after is not None:
                self.random.set(after)
            return
        if ahead is not None and self.forward.ranks is not None:
            raise RanksApart(TOUCHED)
        self._look()
        self.late &= known[1] is not None  # without versions of the weights no step ahead could be put back

    def _look(self) -> None:
        """After code of the user's: the next step compares the model, and calls it if it does more than its forward."""
        self.trusted = 0
        ours = store_of(generating_cache(self.request.kwargs)) is self.store and self.store.length == self.stored
        if not (ours and undisturbed(self.forward)):
            self.fused = self.late = False

    def _state(self) -> tuple[Fingerprint | None, int | None]:
        found = fingerprint_of(self.forward)
        return found, None if found is None else found.versions()

    def _holds(self, known: tuple[Fingerprint | None, int | None]) -> bool:
        """Whether the model is the same, weights included, and is called as it was."""
        before, versions = known
        now = fingerprint_of(self.forward)
        if before is None or versions is None or now is not before or not now.reachable():
            return False
        return now.versions() == versions and now.holds() and undisturbed(self.forward)
