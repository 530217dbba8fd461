"""Where generate() is met: attributes of one model that do what its class does, and a little more."""

import inspect
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from accel.llm.generation.decoder import DecoderForward, Unfit
from accel.llm.generation.lookahead import PREPARE, Lookahead, predictable
from accel.llm.kv_cache.cache import adopt, store_of
from accel.llm.kv_cache.store import Store
from accel.patching.patch import Patch
from accel.patching.per_thread import PerThread

ONE_BY_ONE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class GenerateCall(PerThread):
    """What this thread's generate() call goes on with: the store, and whether its tokens come one by one."""

    def put(self, store: Store | None) -> None:
        self._local.store = None if store is None else weakref.ref(store)

    def store(self) -> Store | None:
        found = getattr(self._local, "store", None)
        return None if found is None else found()


class MethodHook:
    """Stands in `vars(module)[name]`, in place of the method of its class."""

    name: str

    def __init__(self, module: PreTrainedModel, forward: DecoderForward):
        self.module, self.forward = module, forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(getattr(type(self.module), self.name).__get__(self.module))

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    def arguments(self, args: tuple, kwargs: dict) -> dict:
        return self.__signature__.bind(*args, **kwargs).arguments


class GenerateHook(MethodHook):
    """A method that generate() calls; those of one model share what they know of the call."""

    def __init__(self, module: PreTrainedModel, forward: DecoderForward, call: GenerateCall):
        super().__init__(module, forward)
        self.call = call


class PrepareCache(GenerateHook):
    """Adopts the cache of the call, and makes the store of the size that was asked for."""

    name = "_prepare_cache_for_generation"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.call.put(None)
        result = self.stock(*args, **kwargs)
        try:
            weight = self.forward.embeddings()
        except Unfit:  # as the calls to come will tell
            return result
        if self.forward.ledger.rests((weight,), {}):
            return result
        given = self.arguments(args, kwargs)
        cache = given["model_kwargs"].get("past_key_values")
        config = given["generation_config"]
        if cache is not None and not (config.output_attentions or config.output_hidden_states):  # such calls run stock
            store = adopt(cache, self.forward.shapes(), wanted=given.get("max_cache_length", 0))
            if isinstance(store, Store) and given.get("generation_mode") in ONE_BY_ONE:
                self.call.put(store)
        return result


class Criteria(GenerateHook):
    """Lets the stopping criteria begin the next step."""

    name = "_get_stopping_criteria"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        criteria, store = self.stock(*args, **kwargs), self.call.store()
        return criteria if store is None else Lookahead(criteria, self.forward, store)


class PrepareInputs(GenerateHook):
    """Tells the step that was begun which inputs were made for it."""

    name = PREPARE

    def __call__(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = self.stock(input_ids, *args, **kwargs)
        store = store_of(inputs.get("past_key_values"))
        if store is not None and store.pending is not None and store.pending.ids is input_ids:
            store.pending.inputs = inputs
        return inputs


def generate_hooks(model: PreTrainedModel, forward: DecoderForward) -> list[Patch]:
    """For each hook whose method is the class's own; the last two where a step follows from the one before."""
    kinds: list[type[GenerateHook]] = [PrepareCache]
    if forward.runner is not None and predictable(model) and PREPARE not in vars(model):
        kinds += [Criteria, PrepareInputs]
    call = GenerateCall()
    return [Patch(model, kind.name, kind(model, forward, call)) for kind in kinds if kind.name not in vars(model)]
