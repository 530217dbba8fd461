"""Attention that is not understood: its module is called as it is, over its own layer of the caller's cache.

Norms, sums, MLP or experts of the layer are fused around it. What it is called with comes from the layer's own call.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from accel.libraries.cache import Cache
from accel.llm.attention.attention import AttentionSpec, UnderstoodAttention
from accel.llm.attention.mixer_pair import AsItIs
from accel.llm.parts.part import NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord, Stored, given_names
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings, plain_value

INPUT = "the normed input"
Arguments = tuple[tuple[int | str, str], ...]


def called(module: nn.Module, given: Arguments, named: dict[str, Any]) -> Any:
    """What a module gives for these arguments: by place or name, which of `named` each is; "" for None."""
    args = [named.get(source) for place, source in given if isinstance(place, int)]
    told = ((name, source) for name, source in given if isinstance(name, str) and (not source or source in named))
    return module(*args, **{name: named.get(source) for name, source in told})


@dataclass(frozen=True)
class StockSpec(AttentionSpec):
    """given: see `called`. several: it gives a tuple, the first of which is added. behind: which of that the layer
    gives behind its output, None for nothing. reason: why it is not understood.
    """

    given: "Arguments"
    several: bool
    behind: tuple[int | None, ...]
    reason: str = field(compare=False, repr=False)

    @property
    def linears(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def keeps_more(self) -> str | None:
        return self.reason

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundStockAttention":
        return BoundStockAttention(layer, self)

    def bind_out(self, layer: nn.Module) -> AsItIs:
        return AsItIs(1.0)


class BoundStockAttention:
    """The module of such an attention."""

    projections = ()

    def __init__(self, layer: nn.Module, spec: StockSpec):
        self.spec, self.module, self.defaults = spec, layer.get_submodule(spec.name), _defaults(type(layer).forward)

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        spec, named = self.spec, self.defaults | kwargs | {INPUT: h.normed()}
        found = called(self.module, spec.given, named)
        if spec.behind:
            step.behind = tuple(None if place is None else found[place] for place in spec.behind)
        return found[0] if spec.several else found


def stock_attentions(layer: LayerRecord, reason: str) -> Iterator[tuple[LayerRecord, UnderstoodAttention]]:
    """The modules that hold all of the attention of a layer, the smallest first: a record in which each is that."""
    mixers = set(layer.mixers)
    whole = [call for call in layer.calls if mixers and mixers <= set(call.module.modules())]
    if not mixers:  # what it keeps is its own, or is kept in a way that is not seen
        whole = [call for call in layer.inside(layer.layer) if any(isinstance(one, Cache) for one in _given(call))]
    for call in sorted(whole, key=lambda one: sum(1 for _ in one.module.modules())):
        if sum(one.module is call.module for one in layer.calls) > 1 or _cached_elsewhere(layer, call.module):
            continue
        spec = _spec(layer, call, reason)
        if spec is not None:
            nothing = call.output.held.new_empty(0)
            alone = replace(layer, kept=None, borrowed=None, stored=Stored(call.module, 0, nothing, nothing))
            yield alone, UnderstoodAttention(spec, call, call)


def _cached_elsewhere(layer: LayerRecord, attention: nn.Module) -> bool:
    """Whether a module beside the attention is given the cache."""
    inside = set(attention.modules())
    others = (call for call in layer.calls if call.module not in inside and attention not in call.module.modules())
    return any(isinstance(value, Cache) for call in others for value in _given(call))


def _given(call: Call) -> tuple:
    return (*call.args, *call.kwargs.values())


def _spec(layer: LayerRecord, call: Call, reason: str) -> StockSpec | None:
    """None where it is called with something else than the layer is, or the layer gives more than it does."""
    if call.taken is None or call.made is None:
        return None
    names, of_layer = ("", *given_names(call.module)), _defaults(type(layer.layer).forward) | layer.call.named
    given: list[tuple[int | str, str]] = []
    for place, value in (*enumerate(call.args), *call.kwargs.items()):
        if value is call.taken.tensor:
            given.append((place, INPUT))
            continue
        name = place if isinstance(place, str) else next(iter(names[place : place + 1]), "")
        others = () if plain_value(value) else of_layer  # a number may equal one that it is not
        sources = [one for one in (name, *others) if one in of_layer and of_layer[one] is value]
        if not sources and value is not None:
            return None
        given.append((place, sources[0] if sources else ""))
    made: Any = call.result
    several = isinstance(made, tuple)
    if not (made is call.made.tensor or (several and made[0] is call.made.tensor)):
        return None
    behind: list[int | None] = []
    for value in layer.call.result[1:] if isinstance(layer.call.result, tuple) else ():
        place = next((n for n, one in enumerate(made) if one is value and n), None) if several else None
        if value is not None and place is None:
            return None
        behind.append(None if value is None else place)
    own = layer.name(call.module), plain_settings(call.module), (), layer.name(call.module), 0, None
    return StockSpec(*own, tuple(given), several, tuple(behind), reason)


@lru_cache(maxsize=64)
def _defaults(forward: Callable) -> dict[str, Any]:
    """What a layer's forward takes for arguments that it is not given."""
    parameters = inspect.signature(forward).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
