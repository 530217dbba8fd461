"""Softmax attention whose result a gate scales before its last projection: out(attention(x) * activation(gate)).

Qiu et al., "Gated Attention for Large Language Models", 2025. The gate has a projection of its own, as in AFMoE, or
comes out of that of the queries, as in Qwen3-Next; it has a number for each channel, or for each head, as in Laguna.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.comparison import agree
from accel.llm.attention.projections import split
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention, Formula, Parts, SoftmaxSpec
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.fast_forward import Kernels

GATE_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}


@dataclass(frozen=True)
class GatedSpec(SoftmaxSpec):
    """The last of the projections is the gate's. activation: of the gate; bias: the attention's parameter, one number a
    head, that is added to it before, or "".
    """

    activation: str = "sigmoid"
    bias: str = ""

    @classmethod
    def ending(cls, layer: LayerRecord, calls: list[Call], found: Formula) -> tuple[Call, ...] | None:
        x, others = found.projections[0].input, {call.module for call in found.projections}
        for one in (call for call in calls if call.alone and call.made is not None and call.input.same(x)):
            if one.module in others:
                continue
            if layer.known is not None and layer.name(one.module) != layer.known.attention.projections[-1]:
                continue
            gate, heads = one.output.held, found.fields["heads"]
            if gate.shape[-1] not in (heads, heads * found.fields["dim"]):
                continue
            biases = [(name, p) for name, p in layer.attention.named_parameters(recurse=False) if p.shape == (heads,)]
            for (name, bias), activation in product([("", None), *biases], GATE_ACTIVATIONS):
                if layer.known is not None and (name, activation) != layer.known.attention.gating:
                    continue
                for out in gated_ends(layer, calls, found.got, _shifted(gate, bias), activation):
                    found.fields["activation"], found.fields["bias"] = activation, name
                    return out, one
        return None

    @property
    def gating(self) -> tuple[str, str]:
        return self.bias, self.activation

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundGatedAttention":
        return BoundGatedAttention(kernels, layer, self, stack)


class BoundGatedAttention(BoundSoftmaxAttention):
    """The same; one product gives the gate too."""

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        *others, gate = outputs
        gate = _shifted(gate, self.module._parameters[self.spec.bias] if self.spec.bias else None)
        return (*split(others, *self.layout), gate.unflatten(-1, (self.spec.heads, -1)))


@dataclass(frozen=True)
class QueryGatedSpec(SoftmaxSpec):
    """The gate of every head stands behind its queries, (heads, 2, D), in what one projection gives."""

    @classmethod
    def parts(
        cls, layer: LayerRecord, outputs: list[torch.Tensor], layout: dict[str, Any]
    ) -> tuple[Parts, dict[str, Any]] | None:
        if layout["heads"] % (2 * layout["kv_heads"]):
            return None
        found = _beside(outputs, *layout.values())
        return found, {"heads": found[0].shape[2]}

    @classmethod
    def ending(cls, layer: LayerRecord, calls: list[Call], found: Formula) -> tuple[Call, ...] | None:
        gate = found.gate
        ends = () if gate is None else gated_ends(layer, calls, found.got, gate.flatten(2))
        return next(((out,) for out in ends), None)

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundQueryGatedAttention":
        return BoundQueryGatedAttention(kernels, layer, self, stack)


class BoundQueryGatedAttention(BoundSoftmaxAttention):
    """The same, over every other head of the queries' projection; the gate is read where it lies."""

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        layout, heads, *rest = self.layout
        return _beside(outputs, layout, 2 * heads, *rest)


def _beside(outputs: Sequence[torch.Tensor], *layout: Any) -> Parts:
    """As `split`, of which heads of queries and of the gate take turns."""
    both, k, v = split(outputs, *layout)
    q, gate = both.unflatten(2, (-1, 2)).unbind(3)
    return q, k, v, gate


def gated_ends(
    layer: LayerRecord, calls: list[Call], got: torch.Tensor | None, gate: torch.Tensor, activation: str = "sigmoid"
) -> Iterator[Call]:
    """The calls whose input is what attention gives times activation(gate). got: as of `Formula`."""
    if got is None and layer.attended is not None:
        got = layer.attended.output.flatten(2)
    for out in (call for call in calls if call.alone):
        if layer.known is not None and layer.name(out.module) != layer.known.attention.out:
            continue
        if got is None or agree(gated_result(got, gate, activation), out.input.held, slack=2.0):
            yield out


def _shifted(gate: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gate: (rows, tokens, heads or heads * D); bias: (heads,)."""
    return gate if bias is None else (gate.unflatten(-1, (len(bias), -1)) + bias[:, None]).flatten(-2)


def gated_result(got: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """got: (rows, tokens, heads * D); gate: the same, or (rows, tokens, heads)."""
    return (got.unflatten(-1, (gate.shape[2], -1)) * GATE_ACTIVATIONS[activation](gate)[..., None]).flatten(2)
