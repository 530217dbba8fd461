"""Patched methods of one model that generate() calls: each does what its class does, and notes what we need."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from accel.fusion.loop import PerThread
from accel.libraries import generation
from accel.libraries.cache import generating_cache
from accel.libraries.generation import DECODING, PREPARE, UNFINISHED, GenerationMode
from accel.llm.generation.calling_convention import Unfit
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop.agreement import agree_on_tokens, agree_to_generate, digest, refuse_clocks
from accel.llm.generation.loop.handover import Handover, followed
from accel.llm.generation.loop.lookahead import Lookahead
from accel.llm.generation.loop.methods import MethodHook, predictable, stock_methods
from accel.llm.generation.loop.token_loop import GenerateRequest
from accel.llm.kv_cache.cache import adopt, store_of
from accel.llm.kv_cache.store import Store
from accel.patching.patch import Patch

ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Asked(NamedTuple):
    """How generate() was called. usual: without a decoding method of the caller's own, and for this process alone."""

    streamer: Any
    usual: bool


class CallNotes:
    """What one thread's generate() call goes on with, as far as the methods that it has come to have found out.

    known_store: gives the store of its cache. request: where each of its steps follows from the one before. digest:
    what the ranks that share the model must begin with alike. expected: the handover of the loop that is to begin.
    handover: that of the loop that is running.
    """

    digest = ""
    handover: Handover | None = None

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, asked: Asked | None) -> None:
        """Forgets what the call before has found out, but not the loop that this one may be inside of."""
        self.asked = asked
        self.request: GenerateRequest | None = None
        self.expected: Handover | None = None
        self.known_store: Callable[[], Store | None] = _nobody

    @contextmanager
    def decoding(self, around: AbstractContextManager) -> Iterator[Any]:
        """The loop of the call that was prepared last. Loops may be inside one another, as of a streamer's own call."""
        before, self.handover, self.expected = self.handover, self.expected, None
        try:
            with around as given:
                yield given
        finally:
            self.handover = before


def _nobody() -> None:
    return None


class GenerateCall(PerThread):
    """The notes of the call that each thread is in."""

    @property
    def notes(self) -> CallNotes:
        found = getattr(self._local, "notes", None)
        if found is None:
            found = self._local.notes = CallNotes()
        return found


class GenerateHook(MethodHook):
    """A method that generate() calls; those of one model share what they know of the call."""

    def __init__(self, module: PreTrainedModel, forward: DecoderForward, call: GenerateCall):
        super().__init__(module, forward)
        self._call = call

    @property
    def notes(self) -> CallNotes:
        return self._call.notes


class ModeArguments(GenerateHook):
    """Notes the streamer, and whether the decoding method is stock's."""

    name = generation.MODE_ARGUMENTS

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given = self.arguments(args, kwargs)
        found = self.stock(*args, **kwargs)
        usual = given.get("custom_generate") is None and not found.get("synced_gpus")
        self.notes.begin(Asked(found.get("streamer"), usual))
        return found


class SharedInputs(GenerateHook):
    """Notes what the ranks that share the model must begin with alike."""

    name = generation.INPUTS

    def call(self, *args: Any, **kwargs: Any) -> Any:
        found = self.stock(*args, **kwargs)
        self.notes.digest = digest(found[0])
        return found


class SharedOutcome(GenerateHook):
    """Lets no text out that is another one on another rank, as where one has fallen back in the middle of a step."""

    name = "generate"

    def call(self, *args: Any, **kwargs: Any) -> Any:
        found = self.stock(*args, **kwargs)
        if self.forward.ranks is not None:
            agree_on_tokens(self.forward.ranks, getattr(found, "sequences", found))
        return found


class PrepareCache(GenerateHook):
    """Adopts the cache of the call, and makes the store of the size that was asked for."""

    name = generation.CACHE

    def call(self, *args: Any, **kwargs: Any) -> Any:
        asked = self.notes.asked
        self.notes.begin(None)
        if self.forward.ranks is not None:
            given = self.arguments(args, kwargs)
            mode, config = given["generation_mode"], given["generation_config"]
            agree_to_generate(self.forward.ranks, self.notes.digest, mode, config, self.module.device)
        result = self.stock(*args, **kwargs)
        try:
            weight = self.forward.embeddings()
        except Unfit:  # as the calls to come will tell
            return result
        # A compiled forward in its place would trace the store's own code, so it is left the library's cache.
        if self.forward.log.runs_stock_on_cpu((weight,), {}) or vars(self.module).get("forward") is not self.forward:
            return result
        given = self.arguments(args, kwargs)
        model_kwargs, config = given["model_kwargs"], given["generation_config"]
        cache = generating_cache(model_kwargs)
        if cache is not None and not (config.output_attentions or config.output_hidden_states):  # such calls run stock
            store = adopt(cache, self.forward.shapes(), wanted=given.get("max_cache_length", 0))
            if isinstance(store, Store) and given.get("generation_mode") in ONE_BY_ONE:
                self.notes.known_store = weakref.ref(store)
                if asked is not None and asked.usual and followed(config, model_kwargs):
                    kept = model_kwargs | {"use_cache": config.use_cache}
                    self.notes.request = GenerateRequest(config, kept, LogitsProcessorList(), asked.streamer)
        return result


class Processors(GenerateHook):
    """Notes how scores are processed."""

    name = generation.PROCESSORS

    def call(self, *args: Any, **kwargs: Any) -> Any:
        processors, request = self.stock(*args, **kwargs), self.notes.request
        self.notes.request = None if request is None else request._replace(processors=processors)
        return processors


class SharedCriteria(GenerateHook):
    """Refuses stopping criteria by which ranks that share the model would part."""

    name = generation.CRITERIA

    def call(self, *args: Any, **kwargs: Any) -> Any:
        criteria = self.stock(*args, **kwargs)
        if self.forward.ranks is not None:
            refuse_clocks(self.forward.ranks, criteria)
        return criteria


class Criteria(SharedCriteria):
    """Lets the stopping criteria begin the next step, or note what the loop is to go on with."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        criteria, store, request = super().call(*args, **kwargs), self.notes.known_store(), self.notes.request
        self.notes.begin(None)  # what it knows would otherwise stay until the next call
        if store is None:
            return criteria
        self.notes.expected = None if request is None else Handover(self.forward, store, request, criteria)
        return Lookahead(criteria, self.forward, store, self.notes.expected)


class Decoding(GenerateHook):
    """Knows when the loop of a call begins and ends."""

    name = DECODING

    def call(self) -> AbstractContextManager:
        return self.notes.decoding(self.stock())


class Unfinished(GenerateHook):
    """Runs all steps to come where stock's loop asks whether there are any."""

    name = UNFINISHED

    def call(self, *args: Any, **kwargs: Any) -> Any:
        more, handover = self.stock(*args, **kwargs), self.notes.handover
        return more and not (handover is not None and handover.run())


class PrepareInputs(GenerateHook):
    """Tells the step that was begun which inputs were made for it."""

    name = PREPARE

    def call(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = self.stock(input_ids, *args, **kwargs)
        store = store_of(generating_cache(inputs))
        if store is not None and store.pending is not None and store.pending.ids is input_ids:
            store.pending.inputs = inputs
        return inputs


LOOPING: tuple[type[GenerateHook], ...] = (ModeArguments, Processors, Decoding, Unfinished)  # all of them, or none


def generate_hooks(model: PreTrainedModel, forward: DecoderForward) -> list[Patch]:
    """For each hook whose method is the class's own; those but the first where a step follows from the one before."""
    kinds: list[type[GenerateHook]] = [PrepareCache]
    if forward.ranks is not None:
        kinds += [SharedInputs, SharedOutcome]
    if forward.runner is not None and predictable(model) and PREPARE not in vars(model):
        kinds += [Criteria, PrepareInputs]
        needed: tuple[type[GenerateHook], ...] = (PrepareCache, Criteria, *LOOPING)
        free = not any(kind.name in vars(model) for kind in needed)
        if free and stock_methods(model, UNFINISHED, DECODING):
            kinds += LOOPING
    if forward.ranks is not None and Criteria not in kinds:
        kinds.append(SharedCriteria)
    call = GenerateCall()
    return [Patch(model, kind.name, kind(model, forward, call)) for kind in kinds if kind.name not in vars(model)]
