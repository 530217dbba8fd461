"""A gated short convolution as a layer's mixer: out(after * convolution(before * x)), all three from one projection.

LFM2 (Liquid AI, 2025). Its layer keeps the last inputs of the convolution and no state. A step is three launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from accel_kernels import RowStates, Sequences, causal_convolution
from torch import nn

from accel.comparison import agree
from accel.llm.attention.attention import StateSpec, UnderstoodAttention
from accel.llm.kv_cache.shape import StateShape
from accel.llm.parts.part import BoundLinear, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, KeptState, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels

CONV_ACTIVATIONS = (None, "silu")  # behind a convolution
BIASED = "padding goes through the bias of its first projection"


@dataclass(frozen=True)
class ShortConvolutionSpec(StateSpec):
    """A Conv1d `convolution`, then `activation`. order: which thirds of a projection are `before`, `after` and x."""

    convolution: str
    channels: int
    taps: int
    activation: str | None
    order: tuple[int, int, int]

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        kept = layer.kept
        if kept is None or kept.state is not None or kept.inputs is None:
            return None
        convolution = depthwise(kept)
        if convolution is None:
            raise NotUnderstood("the inputs it keeps are not of one convolution of each channel")
        calls = [call for call in layer.inside(kept.attention) if call.alone and call.made is not None]
        for first, out in product(calls, calls):
            for order, activation in _formulas(convolution, kept.inputs.transpose(1, 2), first, out):
                if getattr(first.module, "bias", None) is not None:
                    raise NotUnderstood(BIASED)  # so that stock's convolution sees more than zeros before a text
                sizes = convolution.in_channels, convolution.kernel_size[0]
                return cls.understood(layer, [first], out, layer.name(convolution), *sizes, activation, order)
        raise NotUnderstood("its convolution, or what it gives, is of another formula")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundShortConvolution":
        return BoundShortConvolution(layer, self)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> StateShape:
        return StateShape(None, (self.taps, self.channels), dtype, device)


class BoundShortConvolution:
    """One short convolution with the tensors it reads."""

    def __init__(self, layer: nn.Module, spec: ShortConvolutionSpec):
        self.spec = spec
        self.projections = [BoundLinear(layer.get_submodule(spec.projections[0]))]
        self.weight, self.bias = taps_of(layer.get_submodule(spec.convolution))

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        thirds = self.projections[0](kernels, h).chunk(3, dim=-1)
        before, after, x = (thirds[third] for third in self.spec.order)
        given = {"bias": self.bias, "activation": self.spec.activation, "before": before, "after": after}
        return window_moved(kernels, step.states(self.spec.index), x, self.weight, **given)


def window_moved(
    kernels: Kernels, states: RowStates, x: torch.Tensor, weight: torch.Tensor, **given: Any
) -> torch.Tensor:
    """The convolution of new tokens behind their windows. given: as of the operation.

    Of sequences of different lengths, those of one token each apart from the others: a program takes many tokens.
    """
    ragged, window = states.ragged, states.window
    assert window is not None
    if ragged is None:
        return kernels.causal_convolution(x, weight, window, states.sequences(), **given)
    if ragged.most_prefills:
        y = kernels.causal_convolution(x, weight, window, states.prefills(ragged), **given)
        if not ragged.most_decodes:
            return y
    decodes = states.decodes(ragged)
    gates = {name: given[name] for name in ("before", "after") if given.get(name) is not None}
    given |= {name: gate[:, : decodes.number].transpose(0, 1) for name, gate in gates.items()}
    found = kernels.causal_convolution(x[:, : decodes.number].transpose(0, 1), weight, window, decodes, **given)
    found = found.transpose(0, 1)
    if not ragged.most_prefills:
        return found
    tokens = y[:, : decodes.number]
    torch.where(decodes.slots[:, :1] < 0, tokens, found, out=tokens)
    return y


def _formulas(
    convolution: nn.Conv1d, inputs: torch.Tensor, first: Call, out: Call
) -> Iterator[tuple[tuple[int, int, int], str | None]]:
    """Orders and activations with which these are the projections before and behind a convolution of the inputs."""
    given, channels = out.input.held, convolution.in_channels
    if first.output.held.shape != (*inputs.shape[:2], 3 * channels) or given.shape != inputs.shape:
        return
    thirds = first.output.held.chunk(3, dim=-1)
    for order, activation in product(((0, 1, 2), (0, 2, 1), (1, 0, 2)), CONV_ACTIVATIONS):
        before, after, x = (thirds[third] for third in order)
        if torch.equal(before * x, inputs):
            got = convolved(convolution, x, activation, before=before, after=after)
            if agree(got, given):
                yield order, activation


def depthwise(kept: KeptState) -> nn.Conv1d | None:
    """The one convolution in what kept these inputs, if each channel has its own taps."""
    found = [module for module in kept.attention.modules() if type(module) is nn.Conv1d]
    assert kept.inputs is not None
    alike = len(found) == 1 and found[0].groups == found[0].in_channels == found[0].out_channels
    plain = alike and found[0].dilation == (1,) and found[0].in_channels == kept.inputs.shape[1]
    return found[0] if plain else None


def taps_of(convolution: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(channels, taps), and the bias."""
    weight, bias = convolution._parameters["weight"], convolution._parameters["bias"]
    assert weight is not None
    return weight.squeeze(1), bias


def convolved(convolution: nn.Conv1d, x: torch.Tensor, activation: str | None, **gates: torch.Tensor) -> torch.Tensor:
    """Of whole texts, (rows, tokens, channels)."""
    weight, bias = taps_of(convolution)
    slots = torch.arange(x.shape[0], device=x.device)
    window = x.new_empty(x.shape[0], weight.shape[1], x.shape[2])
    sequences = Sequences(slots, 0 * slots)
    return causal_convolution.reference(x, weight, window, sequences, bias=bias, activation=activation, **gates)
