"""Softmax and linear attention side by side in one layer, which keeps keys and values and, beside them, a state.

Falcon-H1 (TII, 2025): x + a * softmax attention(s * h) + b * linear attention(t * h), of one normed input h. A layer
takes the pair for one attention; what it gives is added as it is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from accel.comparison import is_sum, named_factor
from accel.llm.attention.attention import AttentionSpec, UnderstoodAttention
from accel.llm.attention.linear.linear_attention import LinearSpec
from accel.llm.kv_cache.shape import LayerShape
from accel.llm.parts.norm import NormSpec
from accel.llm.parts.part import BoundLinear, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import LayerRecord, NotUnderstood, Value
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class PairSpec(AttentionSpec):
    """both: the one with keys and values, and the one with a state, or several of one kind, one behind the other; its
    other fields are those of the first, but for the projections of all. inputs, outputs: by what the input of each is
    multiplied, and what it gives.
    """

    both: tuple[AttentionSpec, ...]
    inputs: tuple[float, ...]
    outputs: tuple[float, ...]

    @property
    def mixers(self) -> tuple[AttentionSpec, ...]:
        return self.both

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(norm for part in self.both for norm in part.norms)

    @property
    def has_position_bias(self) -> bool:
        return any(part.has_position_bias for part in self.both)

    @property
    def keeps_state(self) -> bool:
        return any(part.keeps_state for part in self.both)

    @property
    def keywords(self) -> tuple[str, ...]:
        return tuple(word for part in self.both for word in part.keywords)

    @property
    def limits_prompts(self) -> bool:
        return any(part.limits_prompts for part in self.both)

    def completed(self, found: AttentionSpec) -> AttentionSpec:
        if not isinstance(found, PairSpec):
            return self
        return replace(self, both=tuple(one.completed(other) for one, other in zip(self.both, found.both, strict=True)))

    def kernel_key(self) -> str:
        return repr((self.inputs, self.outputs, *(part.kernel_key() for part in self.both)))

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundPair":
        return BoundPair(kernels, layer, self, stack)

    def bind_out(self, layer: nn.Module) -> "AsItIs":
        return AsItIs(self.outputs[1])

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> LayerShape:
        return self.both[0].cache_layout(dtype, device, kv_dtype)


def understand_pair(layer: LayerRecord, found: list[UnderstoodAttention]) -> UnderstoodAttention:
    """found: each alone. Raises NotUnderstood."""
    holders = (layer.layer, *layer.mixers)
    taken, inputs = _input(layer, found, holders)
    branches = [one.last.output.held for one in found]
    outputs = next(_shares(layer, branches, holders), None)
    if outputs is None:
        raise NotUnderstood("what follows two attentions is not the sum of them and the layer's input")
    parts: list[AttentionSpec] = []
    for place, (one, number) in enumerate(zip(found, inputs, strict=True)):
        spec = one.spec
        if isinstance(spec, LinearSpec) and number != 1.0 and not _biased(layer.layer, spec.projections):
            spec, inputs[place] = replace(spec, factor=number), 1.0  # of what its projections give
        parts.append(spec)
    spec = replace(joined(parts), inputs=tuple(inputs), outputs=outputs)
    total = torch.stack([number * one.double() for number, one in zip(outputs, branches, strict=True)]).sum(0)
    begin, end = replace(found[0].first, taken=taken), replace(found[0].last, made=Value(total))
    return UnderstoodAttention(spec, begin, end)


def each_alone(layer: LayerRecord) -> tuple[LayerRecord, ...]:
    """The record with one attention each."""
    if len(layer.mixers) < 2:
        return (layer,) if layer.mixers else ()
    alone = [replace(layer, kept=None, stored=one, attended=attended, earlier=[]) for one, attended in layer.earlier]
    alone.append(replace(layer, kept=None, earlier=[]))
    alone += [] if layer.kept is None else [replace(layer, stored=None, attended=None, earlier=[])]
    known = [None] * len(alone)
    known = known if layer.known is None else [replace(layer.known, attention=one) for one in _known(layer).both]
    return tuple(replace(one, known=knows) for one, knows in zip(alone, known, strict=True))


def joined(parts: list[AttentionSpec]) -> PairSpec:
    """One spec of all, without what is done to inputs and outputs. Raises NotUnderstood."""
    if len({one.window for one in parts if not one.keeps_state}) > 1:
        raise NotUnderstood("its attentions see other keys")
    first, projections = parts[0], tuple(name for part in parts for name in part.projections)
    own = first.name, first.settings, projections, first.out, first.index, first.window
    return PairSpec(*own, tuple(parts), (), ())


def _known(layer: LayerRecord) -> PairSpec:
    found = layer.known.attention
    assert isinstance(found, PairSpec)
    return found


def _biased(layer: nn.Module, names: Iterable[str]) -> bool:
    return any(getattr(layer.get_submodule(name), "bias", None) is not None for name in names)


def _held(holders: tuple[nn.Module, ...]) -> list[float]:
    return [1.0, *(x for holder in holders for x in vars(holder).values() if type(x) is float and x)]


def _input(
    layer: LayerRecord, found: list[UnderstoodAttention], holders: tuple[nn.Module, ...]
) -> tuple[Value, list[float]]:
    """The layer's input or a norm of it that all are given, and by what it is multiplied for each."""
    made = [call.output for call in layer.inside(layer.layer) if call.alone and call.made is not None]
    for value in (*made, layer.call.input):
        numbers: list[float] = []
        for one in found:
            given = one.first.input.held
            alike = given.shape == value.held.shape
            numbers += [n for n in _held(holders) if alike and torch.equal(value.held * n, given)][:1]
        if len(numbers) == len(found):
            return value, numbers
    raise NotUnderstood("two attentions are not given multiples of one input")


def _shares(
    layer: LayerRecord, branches: list[torch.Tensor], holders: tuple[nn.Module, ...]
) -> Iterator[tuple[float, ...]]:
    """The numbers with which the input of a module, or what the layer gives, is the layer's input and so much of each
    branch.
    """
    x = layer.call.input.held
    branches = [one.reshape(x.shape).double() for one in branches]
    given = [call.input.held for call in layer.inside(layer.layer) if call.alone]
    totals = [one for one in given if one.shape == x.shape and not torch.equal(one, x)]
    for total in (*totals, layer.call.output.held):
        if layer.known is not None:  # of a branch that rounding hides, any number would do
            candidates = [_known(layer).outputs]
        else:
            size = total.double().norm(dim=-1, keepdim=True).clamp_min(1e-30)  # no token counts more than another
            columns = torch.stack([(one / size).flatten() for one in branches], 1)
            solved = torch.linalg.lstsq(columns, ((total.double() - x) / size).flatten()[:, None]).solution
            named = [named_factor(float(one), total.dtype, holders) for one in solved.flatten()]
            found = tuple(one for one in named if one)
            # Where the branches are small beside the input, rounding hides what the numbers are near.
            candidates = [(1.0, 1.0), found, *product(dict.fromkeys(_held(holders)), repeat=2)]
        for numbers in (one for one in candidates if len(one) == len(branches)):
            both = torch.stack([number * one for number, one in zip(numbers, branches, strict=True)]).sum(0)
            if is_sum(x, both, 1.0, total):
                yield numbers


class AsItIs:
    """Stands where another attention's last projection does: what is given is `factor` too small, and added."""

    def __init__(self, factor: float):
        self.factor = factor

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        y = before.normed()
        return y * self.factor if residual is None else torch.add(residual, y, alpha=self.factor * scale)


class BoundPair:
    """Both with the tensors they read."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: PairSpec, stack: bool):
        self.spec = spec
        self.both = [part.bind(kernels, layer, stack) for part in spec.both]
        self.outs = [BoundLinear(layer.get_submodule(part.out)) for part in spec.both]
        self.projections = [one for part in self.both for one in part.projections]

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`; the sum of both, projected, over what the second is multiplied by."""
        first, second = (
            NormedInput(part(kernels, step, h if number == 1.0 else NormedInput(h.normed() * number), kwargs))
            for part, number in zip(self.both, self.spec.inputs, strict=True)
        )
        numbers = self.spec.outputs
        return self.outs[0](kernels, first, residual=self.outs[1](kernels, second), scale=numbers[0] / numbers[1])
