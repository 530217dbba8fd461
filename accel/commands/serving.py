"""transformers' own server, in which every model is optimized and every request has settings of its own.

No HTTP is ours. Some names of the server mean something of ours while it is set up and runs (`libraries/server.py`):
the class that loads models, the one that hands requests to continuous batching, the function that seeds a request, and
the handlers, which look at a request's fields first.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig

import accel
from accel.commands.request_fields import ADAPTER, refusing
from accel.errors import reason_of
from accel.libraries.batching import INIT, GenerationOutput, RequestStatus
from accel.libraries.server import Batching, ModelManager, WorkerEnded, logger, served_by
from accel.llm.batching.engine import Engine
from accel.llm.batching.hook import InitContinuousBatching
from accel.llm.batching.limits import limits_of
from accel.llm.batching.manager import BatchManager
from accel.llm.batching.request import StopStrings, was_cut

SEED: ContextVar[int | None] = ContextVar("seed", default=None)  # of the request that this task serves
SAMPLED = ("temperature", "top_k", "top_p")  # what stock's batching can have a request's own value of


class OptimizedModels(ModelManager):
    """Loads models as stock does, and optimizes each once; what cannot be is served as it is, with a warning."""

    def __init__(self, *args: Any, options: accel.Options | None = None, **kwargs: Any) -> None:
        self._optimizing, self._options = threading.Lock(), options
        super().__init__(*args, **kwargs)

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        model, processor = super().load_model_and_processor(*args, **kwargs)
        with self._optimizing:  # whoever asks for a model meanwhile waits for it to be whole
            if not accel.report(model).optimized:
                try:
                    accel.optimize(model, self._options)
                    told = accel.report(model).summary()
                except Exception as error:
                    told = f"is served as it is: {reason_of(error)}"
                logger.warning(f"accel: {type(model).__name__}: {told}")
        return model, processor


class OwnSettings(Batching):
    """Continuous batching in which each request is drawn by its own generation configuration.

    Stock gives all of them that of the first request that ever came.
    """

    def __init__(self, cb_config: ContinuousBatchingConfig | None = None) -> None:
        config = ContinuousBatchingConfig() if cb_config is None else copy.copy(cb_config)
        config.per_request_processors = True
        super().__init__(cb_config=config)

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Stock's, with a manager around which requests get their settings."""
        if self.manager is None:
            super().init_cb(model, gen_config)
            if not isinstance(self.manager, WithSettings):
                self.manager = WithSettings(self.manager)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            with self.manager.settings(gen_config, processor, streaming=True):
                self._refuse(model, inputs, gen_config)
                return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except ValueError as error:  # such as an id that is under way
            raise HTTPException(400, str(error)) from error

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            with self.manager.settings(gen_config, processor, streaming=False):
                self._refuse(model, inputs, gen_config)
                return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except WorkerEnded:
            raise
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:  # why a request failed, which the client would not be told
            raise HTTPException(500, str(error)) from error

    def _refuse(self, model: Any, inputs: Any, config: GenerationConfig) -> None:
        """Raises ValueError for a request that could not run."""
        words = model.get_input_embeddings().weight.shape[0]
        bias = config.sequence_bias or ()
        sequences = bias if isinstance(bias, dict) else [sequence for sequence, _ in bias]
        biased = [token for sequence in sequences for token in sequence]
        if wrong := [token for token in biased if not 0 <= token < words]:
            raise ValueError(f"logit_bias of token {wrong[0]}; valid are token ids below {words}")
        tokens, most = len(inputs["input_ids"]), self.manager.longest()
        if most is not None and tokens > most:
            raise ValueError(f"a prompt of {tokens} tokens, where a request may come to {most}")
        self.manager.refuse(inputs["input_ids"], config)


class ServedCall(NamedTuple):
    """One request for the server: settings of `add_request`, stops where it has no such setting, streaming or not."""

    config: GenerationConfig
    settings: dict[str, Any]
    stops: StopStrings | None
    streaming: bool


class WithSettings:
    """A manager, whose requests are added with the settings of the call they are added in."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.manager = manager
        self.takes_settings = getattr(manager, "takes_settings", False)  # of each request, such as strings that end it
        self._call: ContextVar[ServedCall | None] = ContextVar("call", default=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    @contextmanager
    def settings(self, config: GenerationConfig, processor: Any = None, streaming: bool = False) -> Iterator[None]:
        """Inside, in this task, requests are drawn, and end, by this configuration. processor: or the tokenizer itself.
        Raises ValueError for stop strings without one.
        """
        settings, stops = self._of(config), None
        if config.stop_strings:
            tokenizer = getattr(processor, "tokenizer", processor)
            stops = StopStrings(config.stop_strings, tokenizer, 0)
            if self.takes_settings:
                settings |= {"stop_strings": stops.strings, "tokenizer": tokenizer}
        token = self._call.set(ServedCall(config, settings, None if self.takes_settings else stops, streaming))
        try:
            yield
        finally:
            self._call.reset(token)

    def longest(self) -> int | None:
        """Tokens that a request may come to, where that is known."""
        return longest_request(self.manager)

    def refuse(self, input_ids: list[int], config: GenerationConfig) -> None:
        """Raises ValueError for a request that would come out failed."""
        call = self._call.get()
        if isinstance(self.manager, BatchManager) and call is not None:
            given = {"max_new_tokens": config.max_new_tokens, "eos_token_id": config.eos_token_id} | call.settings
            if (wrong := self.manager.request(input_ids, "", **given).error) is not None:
                raise ValueError(wrong)
        elif not len(input_ids):
            raise ValueError("the prompt is empty; give at least one token")

    def add_request(self, *args: Any, **kwargs: Any) -> str | None:
        call = self._call.get()
        if call is None:
            return self.manager.add_request(*args, **kwargs)
        streaming = {"streaming": True} if call.stops is not None else {}
        return self.manager.add_request(*args, **(kwargs | call.settings | streaming))

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Outputs come as the server can tell them, see `Answer`."""
        call = self._call.get()
        if call is not None:
            callback = Answer(call, callback, lambda: self.cancel_request(request_id))
        self.manager.register_result_handler(request_id, callback)

    def _of(self, config: GenerationConfig) -> dict[str, Any]:
        if self.takes_settings:
            return own_settings(config)
        if (adapter := ADAPTER.get()) is not None:
            raise ValueError(f"adapter={adapter!r}: this model is batched by transformers, which has none by request")
        kinds = self.manager.logit_processor.supported_keys
        wanted = {name: getattr(config, name) for name in SAMPLED} if config.do_sample else {"top_k": 1}
        return {name: kinds[name](value) for name, value in wanted.items() if name in kinds and value is not None}


class Answer:
    """Hands outputs of one request on as the server can tell them: one that was cut is as long as it may be, and where
    the manager knows no stop strings, it ends here. end: ends the request.
    """

    def __init__(
        self, call: ServedCall, callback: Callable[[GenerationOutput], object], end: Callable[[], object]
    ) -> None:
        self.call, self.callback, self.end = call, callback, end
        self.seen, self.ended = 0, False

    def __call__(self, output: GenerationOutput) -> None:
        if self.ended:
            return
        if was_cut(output):
            self.call.config.max_new_tokens = len(output.generated_tokens)  # by which the server tells "length"
            output = replace(output, error=None, status=RequestStatus.FINISHED)
        stops, tokens = self.call.stops, output.generated_tokens
        for count in range(self.seen + 1, len(tokens) + 1 if stops is not None else 0):
            if stops is not None and stops(tokens[:count]):
                self.ended = True
                over = output.is_finished()
                output = replace(output, generated_tokens=tokens[:count], status=RequestStatus.FINISHED)
                if not over:
                    self.end()
                break
        self.seen = len(tokens)
        if self.call.streaming or stops is None or output.is_finished():
            self.callback(output)


def own_settings(config: GenerationConfig) -> dict[str, Any]:
    """What `BatchManager.add_request` takes for a request with this configuration, in the task that serves it."""
    own = {"seed": SEED.get(), "adapter": ADAPTER.get()}
    return {"generation_config": config} | {name: value for name, value in own.items() if value is not None}


def longest_request(manager: Any) -> int | None:
    """Tokens that a request may come to, where that is known: of managers of ours."""
    if hasattr(manager, "longest"):
        return manager.longest
    engine = getattr(manager, "engine", None)
    if isinstance(engine, Engine):
        return engine.limits.context
    hook = vars(manager.model).get(INIT) if isinstance(manager, BatchManager) else None
    if not isinstance(hook, InitContinuousBatching):
        return None
    return limits_of(hook.forward, manager.continuous_batching_config).context  # of the engine that is being made


def note_seed(seed: int) -> None:
    """Stock's way to seed a request is to seed torch, for all requests there are; this one is kept as its own, too."""
    torch.manual_seed(seed)
    SEED.set(seed)


def optimized_serving(models: Callable[..., ModelManager] = OptimizedModels) -> AbstractContextManager[None]:
    """Inside, what transformers serves is optimized. models: what loads them, with the arguments of stock's."""
    return served_by(models, OwnSettings, note_seed, refusing)
