"""Layers whose weights diffusers stores in few bits and casts around each call.

With `enable_layerwise_casting` a hook casts a layer's weights to the compute dtype, and puts the stored ones back after
the call. Code that computes for such layers without calling them does the same in a context. Graphs use another, since
addresses must not change.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.libraries.hooks import KEEPING, casting_hook

UNIT = 64  # numbers: weights begin at a multiple of it, where those of one product can follow one another


class Cast(NamedTuple):
    """A layer without children and what its hook casts. reference: what diffusers' wrapper calls."""

    module: nn.Module
    storage: torch.dtype
    compute: torch.dtype
    reference: Any

    def stored(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights that are in the storage's dtype now."""
        for held in (self.module._parameters, self.module._buffers):
            yield from ((name, one) for name, one in held.items() if one is not None and one.dtype is self.storage)


def cast_of(module: nn.Module) -> Cast | None:
    """How the weights of a layer are cast around its call, if that is all that stands around its forward."""
    found = None if vars(module)["_modules"] else casting_hook(module)
    if found is None:
        return None
    hook, reference = found
    methods = reference.pre_forward, reference.post_forward
    known = methods == (hook.pre_forward, hook.post_forward) or methods == (_pass_arguments, _pass_output)
    tensors = (*module._parameters.values(), *module._buffers.values())
    if any(one is not None and one.is_inference() for one in tensors):
        return None
    if not known and not all(isinstance(getattr(method, "__self__", None), Around) for method in methods):
        return None
    return Cast(module, hook.storage_dtype, hook.compute_dtype, reference)


def uncast(module: nn.Module) -> Any:
    """What an instance has in its forward's place, beneath what diffusers puts there where weights are cast."""
    if (cast := cast_of(module)) is not None:
        return cast.reference.forward
    keeping = casting_hook(module, KEEPING)
    return vars(module).get("forward") if keeping is None else keeping[1].original_forward


def casts_of(modules: Iterable[object]) -> tuple[Cast, ...]:
    """Of those modules whose weights are stored in another dtype than they compute in."""
    found = (cast_of(module) for module in modules if isinstance(module, nn.Module))
    return tuple(cast for cast in found if cast is not None)


@contextmanager
def cast_up(casts: Iterable[Cast]) -> Iterator[None]:
    """Inside, these layers have weights of the compute dtype, and their hooks do nothing."""
    casts = tuple(casts)
    with _hooks_replaced((cast, _pass_arguments, _pass_output) for cast in casts):
        taken = _give(casts)
        try:
            yield
        finally:
            _take_back(taken)


@contextmanager
def in_place(casts: Iterable[Cast]) -> Iterator[None]:
    """Inside, hooks cast weights without moving the stored ones, so that a CUDA graph can be captured."""
    around = map(Around, casts)
    with _hooks_replaced((one.cast, one.give, one.take_back) for one in around):
        yield


class Around:
    """One layer's call: its weights before and after."""

    def __init__(self, cast: Cast):
        self.cast = cast
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def give(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        self.taken = _give((self.cast,))
        return args, kwargs

    def take_back(self, module: nn.Module, output: Any) -> Any:
        _take_back(self.taken)
        self.taken = []
        return output


def _pass_arguments(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
    return args, kwargs


def _pass_output(module: nn.Module, output: Any) -> Any:
    return output


@contextmanager
def _hooks_replaced(ours: Iterable[tuple[Cast, Any, Any]]) -> Iterator[None]:
    """Inside, the hooks of each layer are these, before and after its forward."""
    before = []
    try:
        for cast, pre, post in ours:
            reference = cast.reference
            before.append((reference, reference.pre_forward, reference.post_forward))
            reference.pre_forward, reference.post_forward = pre, post
        yield
    finally:
        for reference, pre, post in reversed(before):
            reference.pre_forward, reference.post_forward = pre, post


def _give(casts: Iterable[Cast]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Casts the weights; returns (weight, stored data) of each. Those of one name and dtype are adjacent in memory, so
    that the weights of queries, keys and values are one matrix.
    """
    groups: dict[tuple, list[torch.Tensor]] = {}
    seen: set[int] = set()
    for cast in casts:
        for name, tensor in cast.stored():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                groups.setdefault((cast.compute, tensor.device, name), []).append(tensor)
    taken: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.inference_mode(False), torch.no_grad():
        for (dtype, device, _), tensors in groups.items():
            kept = [tensor.data for tensor in tensors]
            places = _places(kept, dtype, device)
            torch._foreach_copy_(places, kept)
            for tensor, stored, given in zip(tensors, kept, places, strict=True):
                tensor.data = given
                taken.append((tensor, stored))
    return taken


def _places(stored: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Memory for them in another dtype, laid out as they are."""
    starts, end = [], 0
    for one in stored:
        starts.append(end)
        end += -(-one.numel() // UNIT) * UNIT
    whole = torch.empty(end, dtype=dtype, device=device)
    return [
        whole[start:].as_strided(one.shape, one.stride(), start) if _dense(one) else torch.empty_like(one, dtype=dtype)
        for one, start in zip(stored, starts, strict=True)
    ]


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its numbers lie without gaps, in whatever order."""
    pairs = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    end = 1
    for stride, size in pairs:
        if stride != end:
            return False
        end *= size
    return True


def _take_back(taken: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if taken:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, stored in taken:
                tensor.data = stored
