"""Whether a model is still the one a CUDA graph was captured from."""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import nn

from accel.errors import reason_of
from accel.libraries.code import comes_from
from accel.offload.hooks import BeneathOffload
from accel.parallel.sharded_layers import local
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

CONTAINERS = (dict, list, set, tuple)
ADDRESS, VERSION = torch.Tensor.data_ptr, attrgetter("_version")


class Fingerprint:
    """Attributes of all modules by identity, contents of their containers, classes, and addresses of all weights.

    A swapped adapter, processor, scale, hook, weight, class, method of a class, or field of a configuration changes one
    of them; an in-place update of a weight does not,
    and need not: a graph reads weights where they lie. Made for being asked at every step: what is compared are lists,
    by identity and then equality, tensors by identity alone.

    kept: attributes that are no matter, as (path of the module, name). beside: what it is to see instead of every field
    of objects that modules hold, each something that gives its present values whenever it is iterated over.
    """

    def __init__(self, root: nn.Module, kept: Iterable[tuple[str, str]] = (), beside: Iterable[Iterable] | None = None):
        passed: dict[nn.Module, set[str]] = {}
        for path, name in kept:
            passed.setdefault(root.get_submodule(path), set()).add(name)
        # Views stay live: reading them again shows the present state without walking the tree.
        self._views: list = []
        self._exact: list = []
        self._empty: list = []
        self._tensors: list[torch.Tensor] = []
        self._objects: dict[int, object] = {}
        for module in root.modules():
            attributes = vars(module)
            self._objects[id(module)] = module
            if module in passed:
                self._watch(_Others(attributes, passed[module]))
            else:
                self._watch(BeneathOffload(module) if module is root else attributes.values())
            for name, value in attributes.items():
                if name in IRRELEVANT or not isinstance(value, CONTAINERS):
                    if beside is None:
                        self._look_into(value)
                    continue
                if len(value):
                    self._watch(value.values() if isinstance(value, dict) else value)
                else:
                    self._empty.append(value)
            held = (t for t in chain(module._parameters.values(), module._buffers.values()) if t is not None)
            self._tensors += map(local, held)
        for base in dict.fromkeys(chain.from_iterable(own_classes(type(one)) for one in self._objects.values())):
            self._watch(vars(base).values())
        self._kinds = list(map(type, self._objects.values()))
        for view in beside or ():
            self._watch(view)
        self._values = list(chain.from_iterable(self._views))
        self._exact_values = list(chain.from_iterable(self._exact))
        self._addresses = list(map(ADDRESS, self._tensors))

    def _look_into(self, value: object) -> None:
        """Configurations, attention processors: plain objects of the libraries that a forward reads."""
        if id(value) not in self._objects and comes_from(type(value), "diffusers", "transformers"):
            attributes = getattr(value, "__dict__", None)
            if attributes is not None and not isinstance(value, torch.Tensor | nn.Module | type):
                self._objects[id(value)] = value
                self._watch(attributes.values())
                for inside in attributes.values():  # as the hooks in a registry of diffusers
                    if isinstance(inside, CONTAINERS) and len(inside):
                        self._watch(inside.values() if isinstance(inside, dict) else inside)

    def _watch(self, view: Iterable) -> None:
        tensors = any(issubclass(kind, torch.Tensor) for kind in set(map(type, view)))
        (self._exact if tensors else self._views).append(view)

    def reachable(self) -> bool:
        """True while the weights lie where they lay: replaying a graph then reads no memory given back since."""
        return list(map(ADDRESS, self._tensors)) == self._addresses

    def alike(self, other: "Fingerprint") -> bool:
        """Whether both are of the same modules and tensors, whatever else is set in them."""
        mine, theirs = (list(map(id, chain(one._objects.values(), one._tensors))) for one in (self, other))
        return mine == theirs

    def versions(self) -> int | None:
        """How often weights were changed in place, by autograd's count; None where nobody counts (inference mode)."""
        try:
            return sum(map(VERSION, self._tensors))
        except RuntimeError:
            return None

    def holds(self) -> bool:
        """True while nothing that a forward could read has changed, weights aside (see `reachable`)."""
        try:
            if any(self._empty) or list(map(type, self._objects.values())) != self._kinds:
                return False
            exact, found = list(chain.from_iterable(self._exact)), list(chain.from_iterable(self._views))
            return _same(exact, self._exact_values, all(map(is_, exact, self._exact_values))) and _same(
                found, self._values, _equal_lists(found, self._values)
            )
        except RuntimeError:  # a container changed size while another thread was reading it
            return False


class Versions:
    """How often tensors were changed in place, as autograd counts; those of inference mode, that nobody counts, never.

    Gives their present counts whenever it is iterated over.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]):
        self.tensors = [tensor for tensor in tensors if not tensor.is_inference()]

    def __iter__(self) -> Iterator:
        return map(VERSION, self.tensors)


class _Others:
    """The values of a dictionary but for some names, as they are whenever it is asked."""

    def __init__(self, attributes: dict, names: set[str]):
        self.attributes, self.names = attributes, names

    def __iter__(self) -> Iterator:
        return (value for name, value in self.attributes.items() if name not in self.names)


def _same(found: list, before: list, at_a_glance: bool) -> bool:
    return len(found) == len(before) and (at_a_glance or all(map(_equal, found, before)))


def _equal_lists(found: list, before: list) -> bool:
    try:
        return found == before
    except Exception as error:  # arrays, and whatever else cannot say whether it equals something
        reason_of(error)
        return False


def _equal(value: object, before: object) -> bool:
    """Plain values may be new objects: PEFT multiplies an adapter's scale at every call, and divides it again."""
    return value is before or (type(value) is type(before) and type(value) in (float, int, str) and value == before)
