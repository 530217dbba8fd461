"""The loop of tokens over a store, for decoders alone.

Others see what stock shows them: criteria, then the streamer, token by token. Criteria of the user's run before the
next step is launched, since they may change it. While a streamer runs, the step ahead is undone: cache and random
generator are as in stock. It is put back unless the streamer has changed these or the model. Without a streamer only
other threads run in between, and the model is checked every few steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteriaList

from accel.cuda_graphs.fingerprint import Fingerprint
from accel.errors import RanksApart
from accel.libraries.cache import generating_cache
from accel.libraries.generation import PREPARE, next_inputs, predictable
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.token_loop import UNWATCHED, GenerateRequest, Token, TokenLoop
from accel.llm.generation.prefill import by_graph
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.pending_step import LatestForward
from accel.llm.kv_cache.store import Store
from accel.llm.pipeline.stretch import StretchGraphs
from accel.offload.call_hooks import streamed_model
from accel.patching.owner import InstanceMethod

TOUCHED = (
    "a streamer has changed the model, its cache or the random numbers while generate() ran, of which the other ranks "
    "that share the model know nothing"
)


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
    for layer in () if trusted else forward.layers:
        layer.renew()
    eager, arguments = partial(forward.eager, store, False), (tokens, positions, store.metadata, keep)
    variant = ("mask",) if store.padding_mask is not None else ()
    if isinstance(forward.runner, StretchGraphs) and tokens.is_cuda and by_graph(rows, 1):
        logits: Any = forward.runner(eager, arguments, {}, variant, trusted=trusted)
    elif forward.runner is not None and tokens.is_cuda and by_graph(rows, 1):
        replayed = forward.runner.begin(arguments, {}, variant, at_once=True) if trusted else None
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


class StoreLoop(TokenLoop):
    """store: the cache of the call; `store.latest`: the forward that the last token came of. prompt: tokens of a row
    when generate() began. Positions advance by one, the mask by a 1.
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
        super().__init__(request, criteria, ids, unfinished, store.length)
        self.forward, self.model, self.store, self.prompt = forward, forward.module, store, prompt
        assert store.latest is not None
        self.keep, self.positions, self.start = store.latest.keep, store.latest.positions, ids.shape[1]
        if forward.ranks is not None and self._state()[1] is None:
            self.late = False  # a streamer, which only one of them may have, would end it; all take equally many steps
        self.fused = True  # steps call the forward instead of the model
        self.trusted = 0  # steps to come in which the model is not compared
        self.placed = streamed_model(self.model)

    def length(self) -> int:
        return self.store.length

    def crop(self) -> None:
        if self.store.consistent and self.store.length > self.stored:
            self.store.crop(self.stored)

    @contextmanager
    def around(self) -> Iterator[None]:
        try:
            with nullcontext() if self.placed is None else self.placed.one_call():
                yield
        finally:
            self.store.latest = None

    def call_the_model(self) -> None:
        """It finds the same, and reports it."""
        self.fused = self.late = False

    def logits(self, token: Token) -> torch.Tensor:
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

    def stream(self, chosen: torch.Tensor) -> None:
        """Gives the streamer a token. The step ahead is undone meanwhile, and put back if the streamer changed neither
        the cache, the random numbers nor the model.
        """
        ahead, self.ahead = self.ahead, None
        after = None if self.random is None else self.random.mark()
        if ahead is not None:
            self.go_back(ahead.random)
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
        self.look()
        self.late &= known[1] is not None  # without versions of the weights no step ahead could be put back

    def look(self) -> None:
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
