"""The attention implementation that a model's configurations name."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from accel.libraries.attention import ATTENTIONS, EAGER, FIELD, MASKS, MIXTURES, PAGED
from accel.libraries.code import comes_from
from accel.libraries.experts import EXPERTS


def foreign_attention(modules: list[nn.Module]) -> str | None:
    """Why what these modules ask transformers to attend by may be something else than attention through its masks.

    What is recorded instead shows nothing of it, and a short trial little: it may differ for long texts alone.
    """
    configs = {id(c): c for m in modules for c in vars(m).values() if isinstance(c, PretrainedConfig)}
    names = {vars(config).get(FIELD) for config in configs.values()} - {None}
    for name in sorted(names | {name.removeprefix(PAGED) for name in names}):
        functions = [] if name.startswith(PAGED) else [MASKS.get(name)]
        if name != EAGER:  # which is a function of the model's own file
            functions.append(ATTENTIONS.get(name))
        if None in functions:
            return f"the attention {name!r} has no masks, or is not registered"
        if not all(_of_transformers(function) for function in functions):
            return f"the attention {name!r} is not one of transformers' own"
    return None


def foreign_experts(configs: Iterable[PretrainedConfig]) -> list[Callable]:
    """The functions that these configurations have experts computed by, but for transformers' own, which give equal
    results: generate() itself takes another one for steps than for prompts.
    """
    functions = [MIXTURES.get(vars(config).get(EXPERTS)) for config in configs]
    return [function for function in functions if function is not None and not _of_transformers(function)]


def _of_transformers(function: Callable) -> bool:
    while isinstance(function, partial):
        function = function.func
    return comes_from(function, "transformers")


@contextmanager
def lent_configs(model: nn.Module, name_of: Callable[[Any], str | None] | None = None) -> Iterator[dict]:
    """Inside, the model's modules hold copies of their configurations, as other models may have been made from the same
    ones; yielded by ids of the originals. name_of: the attention implementation that one names -> what it is to name to
    whoever asks on this thread.
    """
    copies: dict = {}
    with ExitStack() as undo:
        for module in model.modules():
            held = vars(module)
            for name in [name for name, value in held.items() if isinstance(value, PretrainedConfig)]:
                undo.callback(held.__setitem__, name, held[name])
                config = held[name] = copy.deepcopy(held[name], copies)
                if name_of is not None and FIELD in vars(config):
                    _name(config, name_of(getattr(config, FIELD)))
        yield copies


class Undecorated:
    """Stands before a configuration's class, so that transformers makes no dataclass of a class derived from it."""

    def __init_subclass__(cls, **_: object) -> None:
        pass


def undecorated(kind: type[PretrainedConfig], attributes: dict[str, Any]) -> type[PretrainedConfig]:
    """A class derived from that of a configuration, which may be derived so itself."""
    bases = (kind,) if issubclass(kind, Undecorated) else (Undecorated, kind)
    return type(kind.__name__, bases, attributes)


def _name(config: PretrainedConfig, attention: str | None) -> None:
    """The configuration names this attention on this thread alone: a call on another one may be half done."""
    kind, thread = type(config), threading.get_ident()
    if getattr(config, FIELD) == attention:
        return

    def read(self: Any) -> Any:
        return attention if threading.get_ident() == thread else vars(self)[FIELD]

    def write(self: Any, value: Any) -> None:
        vars(self)[FIELD] = value

    attributes = {FIELD: property(read, write), "__module__": kind.__module__}
    object.__setattr__(config, "__class__", undecorated(kind, attributes))


@contextmanager
def unpaged(model: nn.Module) -> Iterator[None]:
    """Inside, a model with a paged attention has the same one without pages. The paged one raises in calls with any
    cache but that of continuous batching, which attends to the same tokens.
    """
    configs = [v for module in model.modules() for v in vars(module).values() if isinstance(v, PretrainedConfig)]
    if not any((vars(config).get(FIELD) or "").startswith(PAGED) for config in configs):
        yield
        return
    with lent_configs(model, lambda name: name and name.removeprefix(PAGED)):
        yield
