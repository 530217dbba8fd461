"""What stands between the sum of a layer's parts and its output: an embedding of the layer's own, and a factor.

Per-layer embeddings as of Gemma 3n and Gemma 4: y = (t + norm(projection(act(gate(t)) * embedding))) * factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from accel.comparison import agree, is_sum
from accel.llm.parts.activation import activation_name
from accel.llm.parts.norm import NormSpec, norm_spec
from accel.llm.parts.part import BoundLinear, BoundNorm, Branch, NormedInput
from accel.llm.recording.record import Call, LayerRecord, Value
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings


@dataclass(frozen=True)
class TailSpec:
    """linears: gate and projection, or none; by names from the layer, as norm is. embedding: the keyword under which
    the layer is handed it. settings: of the activation's module. factor: the name of a buffer of one number, or "".
    """

    linears: tuple[str, ...] = ()
    activation: str = ""
    settings: tuple[tuple[str, tuple], ...] = ()
    embedding: str = ""
    norm: NormSpec | None = None
    factor: str = ""


def tails(layer: LayerRecord) -> Iterator[tuple[TailSpec | None, Value, list[Call]]]:
    """What a layer's tail may be, None at last; with the sum before it, and its calls."""
    y = layer.call.output
    own = {**layer.layer._buffers, **layer.layer._parameters}
    factors = {name: one.detach().double() for name, one in own.items() if one is not None and one.numel() == 1}
    sums = {name: Value((y.held.double() / one).to(y.held.dtype)) for name, one in factors.items() if bool(one != 0)}
    for spec, calls in _embeddings(layer, layer.inside(layer.layer)):
        t, added = calls[0].input, calls[-1].output.held
        for name, total in (sums | {"": y}).items():
            if added.numel() == total.held.numel() and is_sum(t.held, added.view(t.held.shape), 1.0, total.held):
                yield replace(spec, factor=name), t, calls
    yield from ((TailSpec(factor=name), total, []) for name, total in sums.items())
    yield None, y, []


def _embeddings(layer: LayerRecord, calls: list[Call]) -> Iterator[tuple[TailSpec, list[Call]]]:
    """Those that a gate multiplies and a projection takes: a spec, and the calls from the gate to the norm."""
    known = [call for call in calls if call.alone and call.made is not None]
    given = {name: one for name, one in layer.call.named.items() if isinstance(one, torch.Tensor)}
    for gate in known:
        for act in (call for call in known if call.input.same(gate.made) and not list(call.module.parameters())):
            name = activation_name(act.module)
            for keyword, one in given.items() if name is not None else ():
                if one.shape != act.output.held.shape:
                    continue
                for last in (call for call in known if call.input.held.shape == one.shape and call is not act):
                    if not agree(act.output.held * one, last.input.held):
                        continue
                    norm = next((call for call in known if call.input.same(last.made)), None)
                    spec = TailSpec(
                        (layer.name(gate.module), layer.name(last.module)),
                        name or "",
                        ((layer.name(act.module), plain_settings(act.module)),),
                        keyword,
                        None if norm is None else norm_spec(layer, norm),
                    )
                    yield spec, [gate, act, last, *([] if norm is None else [norm])]


class BoundTail:
    """A tail with the tensors it reads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: TailSpec):
        self.spec = spec
        self.linears = [BoundLinear(layer.get_submodule(name)) for name in spec.linears]
        self.norm = None if spec.norm is None else BoundNorm(kernels, layer, spec.norm)
        own = {**layer._buffers, **layer._parameters}
        self.factor = own[spec.factor] if spec.factor else None

    def __call__(self, kernels: Kernels, t: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """t: the sum before it, (rows, new, C). kwargs: of the layer's call."""
        if self.linears:
            gate, projection = self.linears
            one = gate(kernels, NormedInput(t), activation=self.spec.activation) * kwargs[self.spec.embedding]
            return Branch(projection, NormedInput(one), t, 1.0, self.norm).added(kernels, self.factor)
        return t if self.factor is None else t * self.factor
