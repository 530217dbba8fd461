"""Whether a model is in the state in which a graph was captured; states that come back find their graphs again."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel.libraries.adapters import CONFIGS
from accel.libraries.code import comes_from
from accel.offload.hooks import beneath_offload
from accel.parallel.sharded_layers import local
from accel.patching.snapshot import Snapshot, View
from accel.patching.structure import own_classes

# Containers every module has that no forward reads; leaving them out makes the check cheaper.
IRRELEVANT = {
    "_non_persistent_buffers_set",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}

# Modules of torch's own, by exact type, and where they hold all that a forward reads of them.
HOLDERS = {nn.Linear: "_parameters", nn.ModuleDict: "_modules", nn.ParameterDict: "_parameters", nn.Identity: None}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")

CONTAINERS = (dict, list, set, tuple)
ADDRESS, VERSION = torch.Tensor.data_ptr, attrgetter("_version")
MOST = 4  # states that are kept; the least recent go first


class Watched(Protocol):
    """What a forward reads besides its module, as views that give the present values when iterated over."""

    def views(self) -> Iterable[Iterable]: ...


class Buffers(Protocol):
    """Copies of what some modules hold, that graphs read in place of it. form: another number once they are gone."""

    form: int

    def apart(self) -> Collection[int]:
        """By number, the modules."""


class Fingerprint(Snapshot):
    """Attributes of all modules by identity, contents of their containers, classes, and addresses of all weights.

    A swapped adapter, processor, scale, hook, weight, class, method or field of a configuration changes one of them. An
    update of a weight in place does not, and need not: a graph reads weights by address (`reachable`).

    ignored: attributes, as (path of the module, name); without a name, the module and all beneath it that is nowhere
    else. watched: in place of every field of the objects that modules
    hold. buffers: follow some modules, which are left out. brief: names of the containers that are looked at;
    of HOLDERS only what they hold, whether another attribute was set beside it, and hooks where anyone has registered
    one since.
    """

    def __init__(
        self,
        root: Any,
        ignored: Iterable[tuple[str, str]] = (),
        watched: Watched | None = None,
        buffers: Buffers | None = None,
        brief: Collection[str] = (),
    ):
        apart: Collection[int] = () if buffers is None else buffers.apart()
        self.apart, self._buffers, self._form = len(apart), buffers, None if buffers is None else buffers.form
        skipped: dict[nn.Module, set[str]] = {}
        parts = tuple(path for path, name in ignored if not name)
        read = None if not parts else _read_outside(root, parts)
        for path, name in (one for one in ignored if one[1]):
            skipped.setdefault(root.get_submodule(path), set()).add(name)
        objects: dict[int, object] = {}
        views: list[Iterable] = []
        containers: list = []
        beside: list[dict] = []
        unhooked: list[dict] = []
        self._unhooked, self._registered = unhooked, RemovableHandle.next_id
        self._tensors: list[torch.Tensor] = []
        for module in root.modules():
            attributes = vars(module)
            if id(module) in apart or (read is not None and id(module) not in read):
                continue
            objects[id(module)] = module
            if brief and type(module) in HOLDERS:
                beside.append(attributes)
                containers += [attributes[place] for place in (HOLDERS[type(module)], *HOOKS) if attributes.get(place)]
                unhooked += [attributes[name] for name in HOOKS if not attributes[name]]
                self._tensors += (one for one in module._parameters.values() if one is not None)
                continue
            unread = {CONFIGS} & attributes.keys() if apart else set()
            if module is root and module not in skipped:
                views.append(View(partial(beneath_offload, module, unread)))
            elif module in skipped or unread:
                views.append(_others(attributes, skipped.get(module, set()) | unread))
            else:
                views.append(attributes.values())
            for name, value in attributes.items():
                if name in unread:
                    continue
                if isinstance(value, CONTAINERS) and (name in brief if brief else name not in IRRELEVANT):
                    containers.append(value)
                elif watched is None and id(value) not in objects and _read_by_field(value):
                    objects[id(value)] = value
                    fields = vars(value).values()
                    views.append(fields)
                    containers += (one for one in fields if isinstance(one, CONTAINERS) and len(one))
            held = (t for t in chain(module._parameters.values(), module._buffers.values()) if t is not None)
            self._tensors += (found := list(map(local, held)))
            views += chain.from_iterable(map(_beside, found))
        classes = dict.fromkeys(chain.from_iterable(own_classes(type(one)) for one in objects.values()))
        views += [vars(base).values() for base in classes]
        views.append(View(partial(map, len, beside)))
        super().__init__(objects.values(), [*views, *(() if watched is None else watched.views())], containers)
        self._addresses = list(map(ADDRESS, self._tensors))

    def holds(self) -> bool:
        return not self._hooked() and super().holds()

    def renewed(self) -> bool:
        return not self._hooked() and super().renewed()

    def _hooked(self) -> bool:
        """Whether there are hooks where there were none."""
        if self._registered != RemovableHandle.next_id and any(self._unhooked):
            return True
        self._registered = RemovableHandle.next_id
        return False

    def reachable(self) -> bool:
        """True while the weights lie where they lay: replaying a graph then reads no memory given back since."""
        if self._buffers is not None and self._buffers.form != self._form:
            return False
        return list(map(ADDRESS, self._tensors)) == self._addresses

    def alike(self, other: "Fingerprint") -> bool:
        """Whether both are of the same modules and tensors, whatever else is set in them."""
        mine, theirs = (list(map(id, chain(one.objects, one._tensors))) for one in (self, other))
        return mine == theirs

    def versions(self) -> int | None:
        """How often weights were changed in place, as autograd counts; None in inference mode, which does not."""
        try:
            return sum(map(VERSION, self._tensors))
        except RuntimeError:
            return None


def _read_outside(root: nn.Module, parts: tuple[str, ...]) -> set[int]:
    """By number, modules that are reached by another way than through these parts of the root."""
    inside = tuple(f"{part}." for part in parts)
    found = root.named_modules(remove_duplicate=False)
    return {id(module) for path, module in found if path not in parts and not path.startswith(inside)}


def _beside(held: object, depth: int = 2) -> Iterator[Iterable]:
    """What lies beside a weight of a library's own class, in attributes of it and of what these hold."""
    if type(held) not in (torch.Tensor, nn.Parameter):
        yield vars(held).values()
        for value in vars(held).values() if depth else ():
            if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module | type):
                yield from _beside(value, depth - 1)


def _read_by_field(value: object) -> bool:
    """Configurations, attention processors, hooks in a registry: objects of the libraries that a forward reads."""
    plain = comes_from(type(value), "diffusers", "transformers") and hasattr(value, "__dict__")
    return plain and not isinstance(value, torch.Tensor | nn.Module | type)


def _others(attributes: dict, names: set[str]) -> View:
    """The values of a dictionary but for some names."""
    return View(lambda: (value for name, value in attributes.items() if name not in names))


class States:
    """States of one module: `now` is the last one that it was found in, None before it was looked at.

    number: of the present state, part of the key of its graphs. known: by number, the present one last. Older states
    are kept only if they have the same modules and weights: others would keep alive what the user has removed.
    """

    def __init__(self) -> None:
        self.known: dict[int, Fingerprint] = {}
        self.now: Fingerprint | None = None
        self.number = self._count = 0

    def renew(self, take: Callable[[], Fingerprint]) -> tuple[Fingerprint, bool]:
        """What the module is now, and whether it was not that before. take: makes its fingerprint."""
        for number, before in reversed(self.known.items()):
            if number != self.number and before.reachable() and before.holds():
                return self._enter(number, before), False
        new = take()
        self._count += 1
        self.known = dict([(number, one) for number, one in self.known.items() if one.alike(new)][1 - MOST :])
        return self._enter(self._count, new), True

    def _enter(self, number: int, state: Fingerprint) -> Fingerprint:
        self.known.pop(number, None)
        self.known[number] = self.now = state
        self.number = number
        return state

    def follow(self, take: Callable[[], Fingerprint], apart: int) -> None:
        """Sees the present state anew where only weights moved, or other modules are `apart`. Without graphs."""
        if self.now is not None and (self.now.apart != apart or not self.now.reachable()) and self.now.holds():
            self.known = {}
            self._enter(self.number, take())

    def clear(self) -> None:
        self.known, self.now, self.number = {}, None, 0
