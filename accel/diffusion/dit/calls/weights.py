"""The tensors that a block holds: weights, and attributes such as the scales of an adapter. Plans read them by path."""

from collections.abc import Iterator

import torch
from torch import nn

from accel.patching.guard import BASE


def weights_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """By path; a tensor that stands in two places under both."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    yield from attributes_of(module)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of modules, or stand in a dictionary that is one, as the scales of adapters do."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in BASE:
                continue
            place = f"{path}.{name}" if path else name
            if isinstance(value, torch.Tensor):
                yield place, value
            elif type(value) is dict:
                yield from ((f"{place}[{key}]", one) for key, one in value.items() if isinstance(one, torch.Tensor))


def attributes_replaced(before: list[tuple[str, torch.Tensor]], now: list[tuple[str, torch.Tensor]]) -> bool:
    """Whether some tensor stands where another stood."""
    return [(path, id(one)) for path, one in before] != [(path, id(one)) for path, one in now]


def weight_forms(held: list[dict[str, torch.Tensor | None]]) -> list:
    """What sorts of tensors modules hold; quick, as it is asked at every call."""
    return [None if one is None else (type(one), one.dtype, one.shape) for part in held for one in part.values()]


def weight_of(module: nn.Module, path: str) -> torch.Tensor:
    """The one that stands at a path now."""
    place, _, key = path.removesuffix("]").partition("[")
    owner, _, name = place.rpartition(".")
    attributes = vars(module.get_submodule(owner))
    for held in (attributes["_parameters"], attributes["_buffers"]):
        if held.get(name) is not None:
            return held[name]
    return attributes[name][key] if key else attributes[name]
