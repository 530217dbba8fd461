"""The guard of a whole language model, see `accel/patching/guard.py`.

It watches the fields of configurations that stock code reads in a call, and that code with the registries of attention
functions. It also watches modules around the layers, which are given an empty cache and an artificial mask.
"""

import copy
import inspect
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from accel.cuda_graphs.fingerprint import VERSION
from accel.in_flight import Here
from accel.libraries.adapters import ANOTHER, BASE
from accel.libraries.attention import ATTENTION, PAGED
from accel.libraries.experts import CHOSEN, EXPERTS
from accel.llm.recording.implementation import foreign_experts, lent_configs, undecorated
from accel.patching.code import CalledCode, NamedValues
from accel.patching.guard import another_class, changed_since, same
from accel.patching.snapshot import View
from accel.patching.structure import CallersHook, foreign_hooks, replaced_forward
from accel.quantization.experts import stock_class

CHOICES = {EXPERTS, CHOSEN}  # among functions of equal results, or of the user's
ABSENT = "absent"
TOKEN = re.compile(r"_token_(id|index)$")


class ModelGuard:
    """What the model was when this was made; `changed` names what has changed since.

    read: configurations, and the names of their fields that matter, see `relevant`. shown: paths of modules that are
    called with other arguments than in stock.
    """

    def __init__(self, model: nn.Module, read: Iterable[tuple[PreTrainedConfig, set[str]]], shown: Iterable[str] = ()):
        self.model = model
        self.stale: str | None = None
        self.held = {path: vars(one)["config"] for path, one in _bases(model).items() if _configured(one)}
        self.fields = [
            (config, name, _kept(getattr(config, name, ABSENT))) for config, names in read for name in sorted(names)
        ]
        self.configurations = configurations(model)
        self.experts = foreign_experts(self.configurations)
        names = [getattr(config, ATTENTION, None) for config in self.configurations]
        chosen = {one for name in names if name is not None for one in (name, name.removeprefix(PAGED))}
        # Now: before the first call it may be another.
        self.code = CalledCode(map(stock_class, model.modules()), chosen)
        found = ((path, model.get_submodule(path)) for path in sorted(shown))
        self.shown = {path: (type(one), replaced_forward(one) is None) for path, one in found if not _takes_one(one)}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"stale": self.changed()}

    def changed(self) -> str | None:
        """What is another than when the model was optimized."""
        if self.stale is not None:
            return self.stale
        modules = dict(self.model.named_modules())
        what = self._another(modules)
        return self._has_hooks(modules) if what is None else changed_since(what)

    def _another(self, modules: dict[str, nn.Module]) -> str | None:
        bases = _bases(self.model)
        gone = [
            *(path for path in self.held if path not in bases),
            *(path for path in self.shown if path not in modules),
        ]
        if gone:
            return f"{gone[0]}, which is gone,"
        for path, config in self.held.items():
            if vars(bases[path]).get("config") is not config:
                return f"the configuration of {path or 'the model'}"
        for config, name, value in self.fields:
            if not same(getattr(config, name, ABSENT), value):
                return f"config.{name}"
        if (replaced := self.code.changed()) is not None:
            return replaced
        if foreign_experts(self.configurations) != self.experts:
            return "the implementation of experts"
        for path, (kind, _) in self.shown.items():
            if type(modules[path]) is not kind:
                return f"{path}: {another_class(kind, type(modules[path]))}"
        return None

    def _has_hooks(self, modules: dict[str, nn.Module]) -> str | None:
        """Why code of the user's would see arguments that stock does not pass. Hooks of transformers read none."""
        for path, (_, plain) in self.shown.items():
            reason = "forward hooks" if foreign_hooks(modules[path], own=(Here, CallersHook)) else None
            reason = reason or (replaced_forward(modules[path]) if plain else None)
            if reason is not None:
                return f"{path} has {reason}, which would be shown an empty cache"
        return None

    def views(self) -> Iterator[Iterable]:
        """What is watched, as views for a `Fingerprint`."""
        yield from self.code.views()
        mappings = []
        for config in self.configurations:
            fields = vars(config)
            mappings.append((fields, [name for name in fields if name not in CHOICES]))
            yield from map(_live, filter(_several, fields.values()))
            yield from (_live(v) for value in fields.values() if _several(value) for v in _live(value) if _several(v))
        yield NamedValues(mappings)
        found = self.configurations
        yield View(lambda: chain(map(len, map(vars, found)), foreign_experts(found)))
        held = [vars(module) for path, module in _bases(self.model).items() if path in self.held]
        # By number: some configurations that are not the same say that they are equal.
        yield View(lambda: (id(attributes.get("config")) for attributes in held))
        # Masks, which are read once; in inference mode nobody counts how often they were changed.
        masks = [one for one in self.model.buffers() if not one.is_floating_point() and not one.is_inference()]
        yield View(lambda: map(VERSION, masks))


def _several(value: object) -> bool:
    return isinstance(value, dict | list | tuple) and bool(value)


def _live(value: dict | list | tuple) -> Iterable:
    return value.values() if isinstance(value, dict) else value


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """All configurations that modules hold, and those inside them."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [vars(module)["config"] for module in model.modules() if _configured(module)]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return list(found.values())


def _bases(model: nn.Module) -> dict[str, nn.Module]:
    """All modules by path; one that adapters are around, or have copies of, has their path, as without them."""
    return {re.sub(rf"\.({BASE}|{ANOTHER})\b", "", path): module for path, module in model.named_modules()}


def _configured(module: nn.Module) -> bool:
    return isinstance(vars(module).get("config"), PreTrainedConfig)


Read = list[tuple[PreTrainedConfig, Counter]]


@contextmanager
def reading(model: nn.Module) -> Iterator[Read]:
    """Inside, modules hold copies of their configurations that count reads of each field, absent ones too."""
    originals: list[PreTrainedConfig] = configurations(model)
    found: Read = []
    with lent_configs(model) as copies:
        for config in originals:
            found.append((config, Counter()))
            lent = copies[id(config)]
            object.__setattr__(lent, "__class__", _counting(type(config), found[-1][1]))
        yield found


def relevant(read: Read, fused: Read, asked: Iterable[str]) -> list[tuple[PreTrainedConfig, set[str]]]:
    """By configuration the fields that matter, of those that a stock run and a fused one read.

    asked: fields that every call looks at, which are left out. So are ids of special tokens that both runs read alike:
    they are for embeddings, which are stock's in both.
    """
    found = []
    for (config, counted), (_, others) in zip(read, fused, strict=True):
        names = {name for name in counted if counted[name] > others[name] or not TOKEN.search(name)}
        found.append((config, {name for name in names - set(asked) if not _computed(config, name)}))
    return found


def _counting(kind: type[PreTrainedConfig], counter: Counter) -> type:
    thread = threading.get_ident()

    def read(self: Any, name: str) -> Any:
        if not name.startswith("__") and name not in CHOICES and threading.get_ident() == thread:
            counter[name] += 1
        return kind.__getattribute__(self, name)  # type: ignore[call-arg]

    return undecorated(kind, {"__getattribute__": read, "__module__": kind.__module__})


def _computed(config: PreTrainedConfig, name: str) -> bool:
    """Whether it is a method or property: the fields that it reads are counted themselves."""
    value = inspect.getattr_static(type(config), name, None)
    return isinstance(value, property | FunctionType | classmethod | staticmethod)


def _kept(value: object) -> object:
    return value if isinstance(value, PreTrainedConfig) else copy.deepcopy(value)


def _takes_one(module: nn.Module) -> bool:
    """Whether its forward takes one tensor alone, so that stock passes it nothing else either."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
