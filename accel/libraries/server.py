"""transformers' own server: its classes, and the names under which it looks them up."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serve import Serve
from transformers.cli.serving import chat_completion, completion, model_manager, response, utils
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBWorkerDeadError as WorkerEnded
from transformers.utils import logging

__all__ = ["ModelManager", "Serve", "WorkerEnded"]

logger = logging.get_logger("transformers.accel")
HANDLERS = (chat_completion.ChatCompletionHandler, completion.CompletionHandler, response.ResponseHandler)


class OwnModels(ModelManager):
    """Models that come from somewhere else."""

    @abstractmethod
    def load(self, name: str) -> Any:
        """The model of a name, which may have a revision behind an "@"."""

    def _load_model(self, model_id_and_revision: str, *_: Any, **__: Any) -> Any:
        return self.load(model_id_and_revision)


class Batching(utils.CBGenerateManager):
    """Hands requests to continuous batching. manager: which runs them, None before the first."""

    @property
    def manager(self) -> Any:
        return self._cb

    @manager.setter
    def manager(self, manager: Any) -> None:
        self._cb = manager


def checking(handler: type, check: Callable[[GenerationConfig, bool], object]) -> type:
    """A handler of requests that has each generation configuration checked that it makes, as is whether it batches."""

    class Checking(handler):  # type: ignore[misc, valid-type]
        def _build_generation_config(self, *args: Any, **kwargs: Any) -> GenerationConfig:
            config: GenerationConfig = super()._build_generation_config(*args, **kwargs)
            check(config, kwargs.get("use_cb", False))
            return config

    return Checking


@contextmanager
def served_by(
    models: Callable[..., ModelManager],
    batching: Callable[..., Batching],
    seed: Callable[[int], None],
    handler: Callable[[type], type],
) -> Iterator[None]:
    """Inside, the server uses these to load models, batch, seed and handle requests. handler: wraps a handler."""
    meant: list[tuple[Any, str, Any]] = [(model_manager, "ModelManager", models)]
    meant += [(utils, "CBGenerateManager", batching), (utils, "set_torch_seed", seed)]
    meant += [(sys.modules[kind.__module__], kind.__name__, handler(kind)) for kind in HANDLERS]
    before = [getattr(module, name) for module, name, _ in meant]
    try:
        for module, name, ours in meant:
            setattr(module, name, ours)
        yield
    finally:
        for (module, name, _), stock in zip(meant, before, strict=True):
            setattr(module, name, stock)
