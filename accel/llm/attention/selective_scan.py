"""A selective scan as a layer's mixer, in which each channel has a state of its own: Mamba-1, Gu and Dao 2023.

One projection gives inputs and gates. The inputs go through a causal convolution; of these a second projection gives
steps in time, keys and queries, perhaps with a norm of each; a third widens the steps to all channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels import Sequences, Widening, selective_scan
from torch import nn

from accel.comparison import agree
from accel.libraries.cache import Cache, DynamicCache, LinearAttentionLayer
from accel.llm.attention.attention import StateSpec, UnderstoodAttention
from accel.llm.attention.short_convolution import BIASED, CONV_ACTIVATIONS, convolved, depthwise, taps_of, window_moved
from accel.llm.kv_cache.shape import STATE, StateShape
from accel.llm.parts.linear import weights
from accel.llm.parts.norm import NormSpec, norm_spec
from accel.llm.parts.part import BoundLinear, BoundNorm, NormedInput, part_product
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, KeptState, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels
from accel.patching.guard import changed_since
from accel.quantization.module import QuantizedLinear
from accel.tolerances import FORMULA, bound

WIDENED = 4  # rows, for each of which the kernel of a step's scan reads the weight that widens its step in time
BEHIND = 2  # tokens behind others, with which is tried what they begin with


class ScanFormula(NamedTuple):
    """What a scan computes, by names from the layer.

    convolution: a Conv1d with so many taps, and its activation. gate_first: the gates stand before the inputs.
    parts: the linear that gives steps in time, keys and queries, of `size` numbers each; part_norms: of these three.
    time: the linear that widens the steps. skip: None for none. anew: several tokens behind others begin with a state
    of zeros.
    """

    convolution: str
    channels: int
    taps: int
    activation: str | None
    gate_first: bool
    parts: str
    size: int
    part_norms: tuple[NormSpec | None, ...]
    time: str
    a_log: str
    skip: str | None
    anew: bool


@dataclass(frozen=True)
class SelectiveScanSpec(StateSpec):
    """A scan between two projections."""

    formula: ScanFormula

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(norm for norm in self.formula.part_norms if norm is not None)

    @property
    def linears(self) -> tuple[str, ...]:
        return (*super().linears, self.formula.parts, self.formula.time)

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        kept = layer.kept
        if kept is None or kept.state is None or kept.inputs is None or kept.state.dim() != 3:
            return None
        found = next(_ScanFinder(layer, kept).found(), None)
        if found is None:
            raise NotUnderstood("its scan, or what it gives, is of another formula")
        formula, first, out = found
        if getattr(first.module, "bias", None) is not None:
            raise NotUnderstood(BIASED)
        return cls.understood(layer, [first], out, formula)

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundSelectiveScan":
        return BoundSelectiveScan(kernels, layer, self)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> StateShape:
        channels = self.formula.channels
        return StateShape((channels, self.formula.size), (self.formula.taps, channels), dtype, device)


class BoundSelectiveScan:
    """One scan with the tensors it reads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: SelectiveScanSpec):
        formula, self.spec = spec.formula, spec
        self.projections = [BoundLinear(layer.get_submodule(spec.projections[0]))]
        self.parts = BoundLinear(layer.get_submodule(formula.parts))
        time = weights(layer.get_submodule(formula.time))
        if time is None:  # stock reads its weight, whatever else it does
            raise NotUnderstood(changed_since(formula.time))
        self.time = time
        self.norms: list[BoundNorm | None] = [
            None if one is None else BoundNorm(kernels, layer, one) for one in formula.part_norms
        ]
        # Whether norms and the product of steps in time can be done by the kernel of the scan.
        plain = not (time.quantized or time.transposed or time.ranks)
        self.inside = plain and all(one is None or _is_root_mean_square(one) for one in self.norms)
        self.weight, self.bias = taps_of(layer.get_submodule(formula.convolution))
        self.a_log = layer.get_parameter(formula.a_log)
        self.skip = None if formula.skip is None else layer.get_parameter(formula.skip)

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        formula, states = self.spec.formula, step.states(self.spec.index)
        x, gate = _halves(self.projections[0](kernels, h), formula.gate_first)
        state, sequences, ragged = states.state, states.sequences(), states.ragged
        assert state is not None
        x = window_moved(kernels, states, x, self.weight, bias=self.bias, activation=formula.activation)
        several = x.shape[1] > 1 and ragged is None
        steps = ragged is not None and not ragged.most_prefills
        if ragged is not None and steps:
            x, gate, sequences = x.transpose(0, 1), gate.transpose(0, 1), states.decodes(ragged)
        dt, k, q = _cut(self.parts(kernels, NormedInput(x)), formula.size)
        scan: dict[str, Any] = {"skip": self.skip, "gate": gate, "anew": formula.anew and several}
        of_time, of_keys, of_queries = self.norms
        inside = [None if one is None else one.norm for one in self.norms]
        if self.inside and x.shape[1] == 1 and x.shape[0] <= WIDENED:
            weight, scan["bias"] = self.time.operands()
            scan["widening"] = Widening(weight, (*inside,))
        else:
            dt = part_product(kernels, self.time, NormedInput(dt.contiguous(), of_time))
            if self.inside:
                scan["widening"] = Widening(None, (None, *inside[1:]))
            else:
                k, q = (t if norm is None else norm(t) for t, norm in ((k, of_keys), (q, of_queries)))
        y = kernels.selective_scan(x, dt, self.a_log, k, q, state, sequences, **scan)
        return y.transpose(0, 1) if steps else y


def _is_root_mean_square(bound: BoundNorm) -> bool:
    norm = bound.norm
    return norm is not None and not norm.centered and norm.bias is None and not norm.offset


def _halves(joint: torch.Tensor, gate_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = joint.chunk(2, dim=-1)
    return (second, first) if gate_first else (first, second)


def _cut(parts: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return parts.split((parts.shape[-1] - 2 * size, size, size), dim=-1)


class _ScanFinder:
    """Looks for the formula of one record."""

    def __init__(self, layer: LayerRecord, kept: KeptState):
        self.layer, self.kept = layer, kept
        self.calls = [call for call in layer.inside(kept.attention) if call.alone and call.made is not None]

    def found(self) -> Iterator[tuple[ScanFormula, Call, Call]]:
        """Those that give the result and the state that were seen, with the calls of the first and last projection."""
        convolution, inputs, state = depthwise(self.kept), self.kept.inputs, self.kept.state
        assert inputs is not None and state is not None
        channels, size = state.shape[1:]
        if convolution is None or inputs.shape[1] != channels or state.dtype != STATE:
            return
        inputs = inputs.transpose(1, 2)
        for first, gate_first in product(self.calls, (False, True)):
            if first.output.held.shape != (*inputs.shape[:2], 2 * channels):
                continue
            x, gate = _halves(first.output.held, gate_first)
            if not torch.equal(x, inputs):
                continue
            for activation, parts in product(CONV_ACTIVATIONS, self.calls):
                rank = parts.output.held.shape[-1] - 2 * size
                if parts.input.held.shape != x.shape or rank < 1 or parts.output.held.dim() != 3:
                    continue
                if agree(convolved(convolution, x, activation), parts.input.held):
                    own = self.layer.name(convolution), channels, convolution.kernel_size[0], activation, gate_first
                    name = self.layer.name(parts.module)
                    for norms, time, rate, skip, out in self._scans(parts, gate):
                        yield ScanFormula(*own, name, size, norms, time, rate, skip, self._anew()), first, out

    def _scans(
        self, parts: Call, gate: torch.Tensor
    ) -> Iterator[tuple[tuple[NormSpec | None, ...], str, str, str | None, Call]]:
        """part_norms, time, a_log and skip of formulas that hold, and the calls of the last projection."""
        layer, attention, state, x = self.layer, self.kept.attention, self.kept.state, parts.input.held
        assert state is not None
        channels, size = state.shape[1:]
        norms, normed = zip(*map(self._norm, _cut(parts.output.held, size)), strict=True)
        dt, k, q = normed
        prefix = f"{layer.name(attention)}."
        own = [(f"{prefix}{name}", p) for name, p in attention.named_parameters(recurse=False)]
        rates = [(name, p) for name, p in own if p.shape == (channels, size)]
        skips = [(name, p) for name, p in own if p.shape == (channels,)]
        called = [call.module for call in self.calls]
        linears = [m for m in attention.modules() if isinstance(m, nn.Linear | QuantizedLinear) and m not in called]
        times = [linear for linear in linears if linear.weight.shape == (channels, dt.shape[-1])]
        for time, rate, skip in product(times, rates, (*skips, (None, None))):
            slots = torch.arange(x.shape[0], device=x.device)
            kept = torch.zeros_like(state)
            wide = F.linear(dt, time.weight, time.bias)
            got = selective_scan.reference(
                x, wide, rate[1], k, q, kept, Sequences(slots, 0 * slots), skip=skip[1], gate=gate
            )  # fmt: skip
            if agree(kept, state, slack=_slack(x)):
                for out in self.calls:
                    if out.input.held.shape == got.shape and agree(got, out.input.held, slack=2.0):
                        yield norms, layer.name(time), rate[0], skip[0], out

    def _norm(self, part: torch.Tensor) -> tuple[NormSpec | None, torch.Tensor]:
        """The norm that was given this, and what it gave; nothing, and this itself."""
        for call in self.calls:
            shape = call.input.held.shape
            if shape == part.shape == call.output.held.shape and torch.equal(call.input.held, part):
                return norm_spec(self.layer, call), call.output.held
        return None, part

    def _anew(self) -> bool:
        """Whether stock takes the state for zeros before several tokens behind others, as up to 5.24 Mamba-1."""
        if self.layer.known is not None:
            return self.layer.known.attention.formula.anew
        kept, cache = self.kept, DynamicCache()
        call = next(call for call in self.layer.calls if call.module is kept.attention)
        x, state = call.input, kept.state
        assert state is not None
        cache.layers = [LinearAttentionLayer() for _ in range(kept.place + 1)]

        def put(value: Any, piece: torch.Tensor) -> Any:
            return piece if value is x.tensor else cache if isinstance(value, Cache) else value

        for piece in (x.held[:, :-BEHIND], x.held[:, -BEHIND:]):
            given = {name: put(value, piece) for name, value in call.kwargs.items()}
            kept.attention(*(put(value, piece) for value in call.args), **given)
        return not agree(cache.layers[kept.place].recurrent_states[0], state, slack=_slack(x.held))


def _slack(x: torch.Tensor) -> float:
    """For states, which are wide, but made of what was rounded."""
    return 2.0 * bound(FORMULA, x.dtype) / bound(FORMULA, STATE)
