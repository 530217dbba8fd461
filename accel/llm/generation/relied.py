"""What the fused forward of a language model stands in for without asking at every call: fields of configurations that
stock code reads in a call, and that code itself, registries of attention functions included.
"""

import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FunctionType

from torch import nn
from transformers import PreTrainedConfig

from accel.errors import reason_of
from accel.llm.recording.implementation import EXPERTS, foreign_experts, lent_configs
from accel.patching.code import Code

ATTENTION = "_attn_implementation"
CHOICES = {EXPERTS, EXPERTS.removesuffix("_internal")}  # among functions of equal results, or of the user's
ABSENT = "absent"
TOKEN = re.compile(r"_token_(id|index)$")


class Relied:
    """The state of all that when it was made; `changed` tells what is another since.

    read: configurations, and the names of their fields that matter, see `relevant`.
    """

    def __init__(self, model: nn.Module, read: Iterable[tuple[PreTrainedConfig, set[str]]]):
        self.model, self.stale = model, None
        self.held = {path: vars(module)["config"] for path, module in model.named_modules() if _configured(module)}
        self.fields = [
            (config, name, _kept(getattr(config, name, ABSENT))) for config, names in read for name in sorted(names)
        ]
        self.configurations = configurations(model)
        self.experts = foreign_experts(self.configurations)
        self._code = self._found()  # now: what is replaced before the first call is another already

    def __getstate__(self):
        # The code cannot be pickled; whether it is another by now is what a copy has to know.
        return vars(self) | {"_code": None, "stale": self.changed()}

    @property
    def code(self) -> Code:
        if self._code is None:  # of a copy
            self._code = self._found()
        return self._code

    def _found(self) -> Code:
        chosen = {getattr(config, ATTENTION, None) for config in configurations(self.model)} - {None}
        return Code(map(type, self.model.modules()), chosen)

    def changed(self) -> str | None:
        """What is another than when the model was optimized."""
        if self.stale is not None:
            return self.stale
        for path, config in self.held.items():
            if vars(self.model.get_submodule(path)).get("config") is not config:
                return f"the configuration of {path or 'the model'} was replaced after accel.optimize"
        for config, name, value in self.fields:
            if not _equal(getattr(config, name, ABSENT), value):
                return f"config.{name} was changed after accel.optimize"
        place = next((place for place in self.code.places if place.changed), None)
        if place is not None:
            return f"{place.label} was replaced after accel.optimize"
        if foreign_experts(self.configurations) != self.experts:
            return "the implementation of experts was changed after accel.optimize"
        return None

    def views(self) -> Iterator[Iterable]:
        """All of it as it is whenever it is asked, for a `Fingerprint`."""
        mappings: dict[object, tuple] = {}
        for place in self.code.places:
            mappings.setdefault(place.owner, (place.mapping, []))[1].append(place.name)
        for config in self.configurations:
            fields = vars(config)
            mappings[id(config)] = fields, [name for name in fields if name not in CHOICES]
            yield from map(_live, filter(_several, fields.values()))
            yield from (_live(v) for value in fields.values() if _several(value) for v in _live(value) if _several(v))
        yield _Names(self, list(mappings.values()))
        yield _Held([vars(self.model.get_submodule(path)) for path in self.held])


class _Names:
    """What lies under names in several mappings, how many fields each configuration has, and the user's experts."""

    def __init__(self, relied: Relied, mappings: list[tuple]):
        self.relied, self.mappings = relied, [(mapping.get, names) for mapping, names in mappings]

    def __iter__(self):
        relied = self.relied
        named = (map(get, names) for get, names in self.mappings)
        return chain(
            map(len, map(vars, relied.configurations)),
            foreign_experts(relied.configurations),
            chain.from_iterable(named),
        )


class _Held:
    """Which configurations modules hold: by number, for some that are not the same say that they are equal."""

    def __init__(self, modules: list[dict]):
        self.modules = modules

    def __iter__(self):
        return (id(attributes.get("config")) for attributes in self.modules)


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


def _configured(module: nn.Module) -> bool:
    return isinstance(vars(module).get("config"), PreTrainedConfig)


Read = list[tuple[PreTrainedConfig, Counter]]


@contextmanager
def reading(model: nn.Module) -> Iterator[Read]:
    """Inside, counts how often the model reads which field of its configurations, absent ones too. Of copies of them,
    which its modules hold meanwhile.
    """
    originals, found = configurations(model), []
    with lent_configs(model) as copies:
        for config in originals:
            found.append((config, Counter()))
            lent = copies[id(config)]
            object.__setattr__(lent, "__class__", _counting(type(config), found[-1][1]))
        yield found


def relevant(read: Read, fused: Read, asked: Iterable[str]) -> list[tuple[PreTrainedConfig, set[str]]]:
    """By configuration the fields that matter, of those that a stock run and a fused one read. Most of what both read
    only stock makes use of, as of what goes into masks.

    asked: fields that are looked at in every call. Numbers of tokens are for embeddings, which are stock's in both.
    """
    found = []
    for (config, counted), (_, others) in zip(read, fused, strict=True):
        names = {name for name in counted if counted[name] > others[name] or not TOKEN.search(name)}
        found.append((config, {name for name in names - set(asked) if not _computed(config, name)}))
    return found


def _counting(kind: type, counter: Counter) -> type:
    def read(self, name):
        if not name.startswith("__") and name not in CHOICES:
            counter[name] += 1
        return kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": read, "__module__": kind.__module__})


def _computed(config: PreTrainedConfig, name: str) -> bool:
    """Methods and properties: what they make their value of has been read too."""
    value = inspect.getattr_static(type(config), name, None)
    return isinstance(value, property | FunctionType | classmethod | staticmethod)


def _kept(value: object) -> object:
    return value if isinstance(value, PreTrainedConfig) else copy.deepcopy(value)


def _equal(value: object, before: object) -> bool:
    if isinstance(value, PreTrainedConfig) or isinstance(before, PreTrainedConfig):
        return value is before
    try:
        return type(value) is type(before) and bool(value == before)
    except Exception as error:  # what cannot say whether it equals something
        reason_of(error)
        return value is before
