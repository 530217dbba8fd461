"""transformers' own server, in which every model is optimized and every request has settings of its own.

No HTTP is ours. Three names of `transformers.cli.serving` mean something of ours while the server is set up and runs:
the class that loads models, the one that hands requests to continuous batching, and the function that seeds a request.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import HTTPException
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationConfig
from transformers.cli.serving import model_manager, utils
from transformers.utils import logging

import accel
from accel.errors import reason_of
from accel.llm.batching.engine import Engine
from accel.llm.batching.manager import BatchManager

logger = logging.get_logger("transformers.accel")
SEED: ContextVar[int | None] = ContextVar("seed", default=None)  # of the request that this task serves
SAMPLED = ("temperature", "top_k", "top_p")  # what stock's batching can have a request's own value of


class OptimizedModels(model_manager.ModelManager):
    """Loads models as stock does, and optimizes each once. One that cannot be is served as it is, and a warning says
    why.
    """

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


class OwnSettings(utils.CBGenerateManager):
    """Continuous batching in which each request is drawn by its own generation configuration.

    Stock gives all of them that of the first request that ever came.
    """

    def __init__(self, cb_config: ContinuousBatchingConfig | None = None) -> None:
        config = ContinuousBatchingConfig() if cb_config is None else copy.copy(cb_config)
        config.per_request_processors = True
        super().__init__(cb_config=config)

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Stock's, with a manager around which requests get their settings."""
        if self._cb is None:
            super().init_cb(model, gen_config)
            if not isinstance(self._cb, WithSettings):
                self._cb: Any = WithSettings(self._cb)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._refuse(inputs)
        try:
            with self._cb.settings(gen_config):
                return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except ValueError as error:  # such as an id that is under way
            raise HTTPException(400, str(error)) from error

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._refuse(inputs)
        try:
            with self._cb.settings(gen_config):
                return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except utils.CBWorkerDeadError:
            raise
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:  # why a request failed, which the client would not be told
            self._refuse(inputs)
            raise HTTPException(500, str(error)) from error

    def _refuse(self, inputs: Any) -> None:
        """Raises HTTPException for a prompt that is longer than any request may be."""
        tokens, most = len(inputs["input_ids"]), self._cb.longest()
        if most is not None and tokens > most:
            raise HTTPException(400, f"a prompt of {tokens} tokens, where a request may come to {most}")


class WithSettings:
    """A manager, whose requests are added with the settings of the call they are added in."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self.manager = manager
        self._settings: ContextVar[dict[str, Any] | None] = ContextVar("settings", default=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    @contextmanager
    def settings(self, config: GenerationConfig) -> Iterator[None]:
        """Inside, in this task, requests are drawn by this configuration."""
        token = self._settings.set(self._of(config))
        try:
            yield
        finally:
            self._settings.reset(token)

    def longest(self) -> int | None:
        """Tokens that a request may come to, where that is known."""
        return longest_request(self.manager)

    def add_request(self, *args: Any, **kwargs: Any) -> str | None:
        return self.manager.add_request(*args, **kwargs, **(self._settings.get() or {}))

    def _of(self, config: GenerationConfig) -> dict[str, Any]:
        if isinstance(self.manager, BatchManager):
            return own_settings(config)
        kinds = self.manager.logit_processor.supported_keys
        wanted = {name: getattr(config, name) for name in SAMPLED} if config.do_sample else {"top_k": 1}
        return {name: kinds[name](value) for name, value in wanted.items() if name in kinds and value is not None}


def own_settings(config: GenerationConfig) -> dict[str, Any]:
    """What `BatchManager.add_request` takes for a request with this configuration, in the task that serves it."""
    seed = SEED.get()
    return {"generation_config": config} | ({} if seed is None else {"seed": seed})


def longest_request(manager: ContinuousBatchingManager) -> int | None:
    """Tokens that a request may come to, where that is known: once an engine of ours is there."""
    engine = getattr(manager, "engine", None)
    return engine.limits.context if isinstance(engine, Engine) else None


def note_seed(seed: int) -> None:
    """Stock's way to seed a request is to seed torch, for all requests there are; this one is kept as its own, too."""
    torch.manual_seed(seed)
    SEED.set(seed)


OURS: tuple[tuple[Any, str, Any], ...] = (
    (utils, "CBGenerateManager", OwnSettings),
    (utils, "set_torch_seed", note_seed),
)


@contextmanager
def optimized_serving(models: Callable[..., model_manager.ModelManager] = OptimizedModels) -> Iterator[None]:
    """Inside, what transformers serves is optimized. models: what loads them, with the arguments of stock's."""
    meant = ((model_manager, "ModelManager", models), *OURS)
    before = [getattr(module, name) for module, name, _ in meant]
    try:
        for module, name, ours in meant:
            setattr(module, name, ours)
        yield
    finally:
        for (module, name, _), stock in zip(meant, before, strict=True):
            setattr(module, name, stock)
