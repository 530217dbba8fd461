"""Kinds of blocks and of calls: what decides which steps a forward makes, as values that are equal for equal steps; and
the code that a call runs.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.diffusion.dit.recorder import PLAIN, tensors_in
from accel.libraries.diffusion import attention_backends
from accel.patching.code import CalledCode, ClassCode, CodeTable
from accel.patching.guard import BASE, settings_of
from accel.quantization.scheme import Scheme


def sort_of(module: nn.Module) -> tuple:
    """All that decides what a block computes besides its weights: equal for blocks of one program."""
    found: list[tuple] = []
    for path, part in module.named_modules():
        tensors = [*part._parameters.items(), *part._buffers.items()]
        shapes = ((name, None if t is None else (type(t), t.shape, t.dtype, t.device)) for name, t in tensors)
        found.append((path, type(part), _settings(part), tuple(shapes)))
        processor = vars(part).get("processor")
        if processor is not None:
            found.append((type(processor), _settings(processor)))
    return tuple(found)


def _settings(part: object) -> tuple:
    held = ((name, value) for name, value in settings_of(part).items() if name not in BASE and name != "processor")
    return tuple((name, frozen(value)) for name, value in held)


def frozen(value: object) -> Hashable:
    """Plain settings, and containers of them, by what they are; tensors by their form; others by which they are."""
    if isinstance(value, (*PLAIN, Scheme)):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), *map(frozen, value)
    if isinstance(value, dict):
        return type(value), *((frozen(name), frozen(one)) for name, one in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(frozen, value))
    return Identity(value)


@dataclass(frozen=True, eq=False)
class Identity:
    """An object as itself, whatever it says it equals; kept, so that no other gets its place in memory."""

    held: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def call_of(args: tuple, kwargs: dict) -> tuple | None:
    """All that decides which steps a call makes; None where it is not known. Tensors by shape, strides and dtype, and
    by which of them are one.
    """
    form, places = _form((args, kwargs)), [id(tensor) for tensor in tensors_in((args, kwargs))]
    if form is None or len(set(places)) == len(places):
        return form
    return form, *map(places.index, places)


def without_strides(call: Any) -> Any:
    """What decides it, but for how its tensors lie in memory."""
    if not isinstance(call, tuple) or isinstance(call, torch.Size):
        return call
    if len(call) == 5 and call[0] == "tensor":
        return call[:2] + call[3:]
    return tuple(map(without_strides, call))


def _form(tree: Any) -> tuple | None:
    if isinstance(tree, torch.Tensor):
        if type(tree) not in (torch.Tensor, nn.Parameter) or tree.layout is not torch.strided:
            return None
        return "tensor", tree.shape, tree.stride(), tree.dtype, tree.device
    if isinstance(tree, tuple | list | dict):
        if type(tree) not in (tuple, list, dict):
            return None
        pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
        members = [(name, _form(one)) for name, one in pairs]
        return None if any(one is None for _, one in members) else (type(tree), *members)
    return ("plain", type(tree), tree) if isinstance(tree, PLAIN) else None


class BlockCode(CalledCode):
    """All that is written in the classes of a block, the functions that a call runs, and diffusers' attention backends.

    A plan calls none of it: it holds what these functions were seen to compute.
    """

    def find(self) -> list[CodeTable]:
        return [*ClassCode(self.kinds).tables, *super().find(), *_backend_tables()]

    def entries(self) -> list[object]:
        return list(attention_backends().values())


def _backend_tables() -> list[CodeTable]:
    found = attention_backends()
    return [CodeTable("attention backends", found, tuple(found), dict(found))] if found else []
