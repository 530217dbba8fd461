"""Patched methods of one model that generate() calls: each does what its class does, and notes what we need."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from accel.errors import Unfit
from accel.fusion.host_numbers import FEW, HostNumbers
from accel.fusion.loop import PerThread
from accel.libraries import generation
from accel.libraries.attention import MASK
from accel.libraries.cache import NAMES, generating_cache, new_cache, own_cache
from accel.libraries.generation import (
    DECODING,
    GRIDS,
    PREPARE,
    UNFINISHED,
    GenerationMode,
    predictable,
    stock_methods,
    with_growing_cache,
)
from accel.libraries.step_inputs import prepares_as_stock
from accel.llm.generation.calling_convention import shows_all
from accel.llm.generation.decoder import DecoderForward
from accel.llm.generation.loop import handover
from accel.llm.generation.loop.agreement import agree_on_tokens, agree_to_generate, digest, refuse_clocks
from accel.llm.generation.loop.handover import Handover, Lookahead, asks_for_tokens_alone
from accel.llm.generation.loop.token_loop import GenerateRequest
from accel.llm.kv_cache.cache import store_of
from accel.llm.kv_cache.shape import StateShape
from accel.llm.kv_cache.store import Store
from accel.patching.owner import InstanceMethod
from accel.patching.rule import Patch

HookFunction = Callable[..., Any]
ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Asked(NamedTuple):
    """How generate() was called. usual: without a decoding method of the caller's own, and for this process alone."""

    streamer: Any
    usual: bool


class CallNotes:
    """What the hooks of one thread's generate() call have found out so far.

    known_store: gives the store of its cache. request: set if each step follows from the one before. digest: of what
    ranks that share the model must begin with alike. expected: the handover of the loop that is to begin. handover:
    that of the loop that is running.
    """

    digest = ""
    handover: Handover | None = None

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, asked: Asked | None) -> None:
        """Forgets the call before, but not the loop that this one may run inside of."""
        self.asked = asked
        self.request: GenerateRequest | None = None
        self.expected: Handover | None = None
        self.known_store: Callable[[], Store | None] = lambda: None

    @contextmanager
    def decoding(self, around: AbstractContextManager) -> Iterator[Any]:
        """The loop of the call that was prepared last. Loops may be nested, by a streamer that calls generate()."""
        before, self.handover, self.expected = self.handover, self.expected, None
        try:
            with around as given:
                yield given
        finally:
            self.handover = before


class GenerateCall(PerThread):
    """The notes of the call that each thread is in. kind: makes those of a thread."""

    copied = ("kind",)

    def __init__(self, kind: Callable[[], Any] = CallNotes) -> None:
        super().__init__()
        self.kind = kind

    @property
    def notes(self) -> Any:
        found = getattr(self._local, "notes", None)
        if found is None:
            found = self._local.notes = self.kind()
        return found


class MethodHook(InstanceMethod):
    """Stands in `vars(module)[name]`, in place of the method of its class."""

    def __init__(self, module: Any, forward: Any):
        self.module, self.forward = module, forward

    @property
    def owner(self) -> Any:
        return self.module

    def arguments(self, args: tuple, kwargs: dict) -> dict:
        return self.__signature__.bind(*args, **kwargs).arguments

    def stock_with(self, args: tuple, kwargs: dict, **others: Any) -> Any:
        """What `stock` gives with other values of these arguments."""
        bound = self.__signature__.bind(*args, **kwargs)
        bound.arguments.update(others)
        return self.stock(*bound.args, **bound.kwargs)


class GenerateHook(MethodHook):
    """A method that generate() calls; those of one model share what they know of the call.

    run: a function of this hook and the arguments, which calls `stock` and does more.
    """

    def __init__(self, module: Any, forward: Any, call: GenerateCall, name: str, run: HookFunction):
        super().__init__(module, forward)
        self.name, self.run, self._call = name, run, call

    @property
    def notes(self) -> Any:
        return self._call.notes

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def mode_arguments(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Notes the streamer, and whether the decoding method is stock's."""
    given = hook.arguments(args, kwargs)
    found = hook.stock(*args, **kwargs)
    usual = given.get("custom_generate") is None and not found.get("synced_gpus")
    hook.notes.begin(Asked(found.get("streamer"), usual))
    return found


def inputs_of_ranks(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Notes what the ranks that share the model must begin with alike."""
    found = hook.stock(*args, **kwargs)
    hook.notes.digest = digest(found[0])
    return found


def outcome_of_ranks(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Lets no text out that is another one on another rank, as where one has fallen back in the middle of a step."""
    found = hook.stock(*args, **kwargs)
    if hook.forward.ranks is not None:
        agree_on_tokens(hook.forward.ranks, getattr(found, "sequences", found))
    return found


def prepare_cache(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Adopts the cache of the call, and makes the store of the size that was asked for."""
    forward, notes, asked = hook.forward, hook.notes, hook.notes.asked
    notes.begin(None)
    given = hook.arguments(args, kwargs)
    model_kwargs, config, mode = given["model_kwargs"], given["generation_config"], given.get("generation_mode")
    if forward.ranks is not None:
        agree_to_generate(forward.ranks, notes.digest, given["generation_mode"], config, hook.module.device)
    follows = mode in ONE_BY_ONE and (not forward.one_by_one or shows_all(model_kwargs.get(MASK)))
    usual = follows and asked is not None and asked.usual
    unseen = usual and asks_for_tokens_alone(config, model_kwargs) and generating_cache(model_kwargs) is None
    growing = with_growing_cache(hook.module, config) if unseen and steps_replay(forward) else None
    as_asked = partial(hook.stock, *args, **kwargs)
    result = as_asked() if growing is None else hook.stock_with(args, kwargs, generation_config=growing)
    store = _adopted(hook, given)
    if store is None and growing is not None:  # for stock's own code the cache that was asked for is the faster one
        for name in NAMES:
            model_kwargs.pop(name, None)
        return as_asked()
    if store is not None and follows:
        notes.known_store = weakref.ref(store)
        if usual and asks_for_tokens_alone(config, model_kwargs):
            kept = model_kwargs | {"use_cache": config.use_cache}
            notes.request = GenerateRequest(config, kept, LogitsProcessorList(), asked.streamer)
    return result


def steps_replay(forward: Any) -> bool:
    """Whether steps come from graphs: these are faster than what stock compiles for a cache of fixed size."""
    return forward.runner is not None and forward.module.device.type in handover.DEVICES and forward.mode() is None


def _adopted(hook: GenerateHook, given: dict[str, Any]) -> Store | None:
    """The store of the cache that stock has prepared; None where it goes on by itself, as the calls to come tell."""
    forward, model_kwargs, config = hook.forward, given["model_kwargs"], given["generation_config"]
    try:
        # A compiled forward in its place would trace the store's own code, so it is left the library's cache.
        ours = vars(hook.module).get("forward") is forward
        if forward.log.runs_stock_on_cpu((forward.embeddings(),), {}) or not ours:
            return None
        cache = theirs = generating_cache(model_kwargs)
        alone = given.get("generation_mode") in ONE_BY_ONE and config.prefill_chunk_size is None
        if cache is None and alone and config.use_cache:
            cache = None if own_cache(hook.module) is None else new_cache(hook.module)  # as the model would
        if cache is None or config.output_attentions or config.output_hidden_states:  # such calls run stock
            return None
        store = forward.adopt(cache, given.get("max_cache_length", 0))
    except Unfit:
        return None
    if theirs is None:
        model_kwargs[forward.cache_name] = cache
    return store


def count_positions(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Counts positions of a text with pictures on the host: the model's own code reads token by token."""
    inputs, given = hook.arguments(args, kwargs).values()
    if not inputs.is_cuda or inputs.is_floating_point() or not any(given.get(name) is not None for name in GRIDS):
        return hook.stock(*args, **kwargs)
    tensors = ((name, one) for name, one in given.items() if type(one) is torch.Tensor and one.numel() <= FEW)
    found = hook.stock(inputs.cpu(), given | {name: one.cpu() for name, one in tensors})
    for one in hook.forward.convention.kept_tensors:
        module = hook.module.get_submodule(one.path)
        if isinstance(value := getattr(module, one.name), torch.Tensor):
            setattr(module, one.name, value.to(inputs.device))
    return found.to(inputs.device)


def encode_pictures(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Encodes pictures without waiting for them: how many tokens each gives, and which they are, is known before."""
    ids, given = list(hook.arguments(args, kwargs).values())[:2]
    pictures = any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in given.values())
    with HostNumbers.of_call(given | {"inputs": ids} if pictures else {}) as known:
        known.note()
        return hook.stock(*args, **kwargs)


def note_processors(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Notes how scores are processed. Whether the inputs are tokens is read on the host: pictures are being encoded."""
    with HostNumbers.of_call({"inputs": hook.arguments(args, kwargs).get("encoder_input_ids")}, waits=False):
        processors, request = hook.stock(*args, **kwargs), hook.notes.request
    hook.notes.request = None if request is None else request._replace(processors=processors)
    return processors


def criteria_of_ranks(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Refuses stopping criteria by which ranks that share the model would part."""
    criteria = hook.stock(*args, **kwargs)
    if hook.forward.ranks is not None:
        refuse_clocks(hook.forward.ranks, criteria)
    return criteria


def criteria(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Lets the stopping criteria begin the next step, or note what the loop is to go on with."""
    found, notes = criteria_of_ranks(hook, *args, **kwargs), hook.notes
    store, request = notes.known_store(), notes.request
    notes.begin(None)  # what it knows would otherwise stay until the next call
    if store is None:
        return found
    notes.expected = None if request is None else Handover(hook.forward, store, request, found)
    return Lookahead(found, hook.forward, store, notes.expected)


def decoding(hook: GenerateHook) -> AbstractContextManager:
    """Knows when the loop of a call begins and ends."""
    return hook.notes.decoding(hook.stock())


def unfinished(hook: GenerateHook, *args: Any, **kwargs: Any) -> Any:
    """Runs all steps to come where stock's loop asks whether there are any."""
    more, handover = hook.stock(*args, **kwargs), hook.notes.handover
    return more and not (handover is not None and handover.run())


def prepare_inputs(hook: GenerateHook, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tells the step that was begun which inputs were made for it, and notes what of a prompt's is known."""
    known = HostNumbers.of_call({"ids": input_ids}, waits=False)
    with known if known.known else nullcontext():
        inputs = hook.stock(input_ids, *args, **kwargs)
        known.note()
    store = store_of(generating_cache(inputs))
    if store is not None and store.pending is not None and store.pending.ids is input_ids:
        store.pending.inputs = inputs
    return inputs


# By the method's name. Those that a loop of ours needs beside the first two: all of them, or none.
LOOKING_AHEAD = {generation.CRITERIA: criteria, PREPARE: prepare_inputs}
LOOPING = {
    generation.MODE_ARGUMENTS: mode_arguments,
    generation.PROCESSORS: note_processors,
    DECODING: decoding,
    UNFINISHED: unfinished,
}
OF_RANKS = {generation.INPUTS: inputs_of_ranks, "generate": outcome_of_ranks, generation.CRITERIA: criteria_of_ranks}


def generate_hooks(model: PreTrainedModel, forward: DecoderForward) -> list[Patch]:
    """For each hook whose method is the class's own; those but the first where a step follows from the one before."""
    hooks: dict[str, HookFunction] = {generation.CACHE: prepare_cache}
    hooks |= {generation.POSITIONS: count_positions} if forward.convention.kept_tensors else {}
    if hasattr(model, generation.ENCODE) and generation.ENCODED in forward.names:
        hooks[generation.ENCODE] = encode_pictures
    if forward.ranks is not None:
        hooks |= OF_RANKS
    own = getattr(type(model), PREPARE)
    if forward.runner is not None and not predictable(model) and predictable(model, own):
        attends = any(shape.keeps and not isinstance(shape, StateShape) for shape in forward.shapes())
        if prepares_as_stock(model, attends):
            forward.convention = replace(forward.convention, prepared=own)
    if forward.runner is not None and predictable(model, forward.convention.prepared) and PREPARE not in vars(model):
        hooks |= LOOKING_AHEAD
        free = not any(name in vars(model) for name in (generation.CACHE, generation.CRITERIA, *LOOPING))
        if free and stock_methods(model, UNFINISHED, DECODING):
            hooks |= LOOPING
    call = GenerateCall()
    found = ((name, GenerateHook(model, forward, call, name, run)) for name, run in hooks.items())
    return [Patch(model, name, hook) for name, hook in found if name not in vars(model)]
