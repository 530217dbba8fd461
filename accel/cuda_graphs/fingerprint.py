"""Whether a model is still the one a CUDA graph was captured from."""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

from accel.libraries.code import comes_from
from accel.offload.hooks import BeneathOffload
from accel.parallel.sharded_layers import local
from accel.patching.snapshot import Snapshot
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


class Fingerprint(Snapshot):
    """Attributes of all modules by identity, contents of their containers, classes, and addresses of all weights.

    A swapped adapter, processor, scale, hook, weight, class, method of a class, or field of a configuration changes one
    of them; an in-place update of a weight does not, and need not: a graph reads weights where they lie (`reachable`).

    kept: attributes that are no matter, as (path of the module, name). beside: what it is to see instead of every field
    of objects that modules hold, each something that gives its present values whenever it is iterated over.
    """

    def __init__(self, root: nn.Module, kept: Iterable[tuple[str, str]] = (), beside: Iterable[Iterable] | None = None):
        passed: dict[nn.Module, set[str]] = {}
        for path, name in kept:
            passed.setdefault(root.get_submodule(path), set()).add(name)
        objects: dict[int, object] = {}
        views: list[Iterable] = []
        containers: list = []
        self._tensors: list[torch.Tensor] = []
        for module in root.modules():
            attributes = vars(module)
            objects[id(module)] = module
            if module in passed:
                views.append(_Others(attributes, passed[module]))
            else:
                views.append(BeneathOffload(module) if module is root else attributes.values())
            for name, value in attributes.items():
                if name not in IRRELEVANT and isinstance(value, CONTAINERS):
                    containers.append(value)
                elif beside is None and id(value) not in objects and _read_by_field(value):
                    objects[id(value)] = value
                    fields = vars(value).values()
                    views.append(fields)
                    containers += (one for one in fields if isinstance(one, CONTAINERS) and len(one))
            held = (t for t in chain(module._parameters.values(), module._buffers.values()) if t is not None)
            self._tensors += map(local, held)
        classes = dict.fromkeys(chain.from_iterable(own_classes(type(one)) for one in objects.values()))
        views += [vars(base).values() for base in classes]
        super().__init__(objects.values(), [*views, *(beside or ())], containers)
        self._addresses = list(map(ADDRESS, self._tensors))

    def reachable(self) -> bool:
        """True while the weights lie where they lay: replaying a graph then reads no memory given back since."""
        return list(map(ADDRESS, self._tensors)) == self._addresses

    def alike(self, other: "Fingerprint") -> bool:
        """Whether both are of the same modules and tensors, whatever else is set in them."""
        mine, theirs = (list(map(id, chain(one.objects, one._tensors))) for one in (self, other))
        return mine == theirs

    def versions(self) -> int | None:
        """How often weights were changed in place, by autograd's count; None where nobody counts (inference mode)."""
        try:
            return sum(map(VERSION, self._tensors))
        except RuntimeError:
            return None


def _read_by_field(value: object) -> bool:
    """Configurations, attention processors, hooks in a registry: objects of the libraries that a forward reads."""
    plain = comes_from(type(value), "diffusers", "transformers") and hasattr(value, "__dict__")
    return plain and not isinstance(value, torch.Tensor | nn.Module | type)


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
