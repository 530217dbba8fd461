"""Lightning attention: linear attention of which each head decays by a number of its own, without a convolution.

Qin et al., "Lightning Attention-2", 2024. One projection gives queries, keys and values, which go through an
activation; what a state gives is normed, and multiplied by a gate of the input before the last projection.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from accel_kernels import Decay, RowStates, Sequences, linear_attention_prompt
from accel_kernels.norm.norm import ACTIVATIONS
from accel_kernels.norm.rms_norm import GATES, Gate
from torch import nn

from accel.comparison import agree
from accel.libraries.cache import Cache
from accel.llm.attention.attention import StateSpec, UnderstoodAttention
from accel.llm.attention.linear.linear_attention import AnySequences, BoundLinearAttention, TokenParts
from accel.llm.attention.linear.linear_finder import multiplies
from accel.llm.kv_cache.shape import STATE, StateShape
from accel.llm.parts.norm import NormSpec, norm_spec, normlike
from accel.llm.parts.part import BoundNorm, BoundProjections, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels
from accel.tolerances import FORMULA, bound

LONGEST = 4096  # tokens of a block, by which stock may go through a prompt
OPTIONS: dict[str, Any] = {"scale": 1.0, "key_eps": None}
AT_ONCE = (1.0, 1.0)  # limits of a step in time, which then is 1, so that a head decays by its rate


class LightningFormula(NamedTuple):
    """From what the first projection gives to what the norm is given.

    heads, key_dim, value_dim: sizes of the state. by_head: a head's query, key and value stand together. activation: of
    all three. rate: the name of a tensor of how fast each head decays.
    """

    heads: int
    key_dim: int
    value_dim: int
    by_head: bool
    activation: str | None
    rate: str

    def parts(self, joint: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of (rows, tokens, N), activated: q, k (rows, tokens, heads, Dk), v (.., heads, 1, Dv), and a, zeros."""
        sizes = self.key_dim, self.key_dim, self.value_dim
        if self.by_head:
            q, k, v = joint.unflatten(-1, (self.heads, -1)).split(sizes, dim=-1)
        else:
            q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in joint.split([self.heads * n for n in sizes], dim=-1))
        zero = joint.new_zeros(()).expand(*v.shape[:-1], 1)
        return {"q": q, "k": k, "v": v.unsqueeze(-2), "a": zero}

    def decay(self, layer: nn.Module, zeros: torch.Tensor) -> Decay:
        """As its rates are now. zeros: one a head."""
        return Decay(_tensor(layer, self.rate).flatten().to(STATE).log(), zeros, limits=AT_ONCE)

    def attended(self, layer: nn.Module, joint: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of whole texts what a state gives, (rows, tokens, heads * Dv), and that. joint: before the activation."""
        parts = self.parts(joint if self.activation is None else ACTIVATIONS[self.activation](joint))
        state = torch.zeros(joint.shape[0], self.heads, self.key_dim, self.value_dim, device=joint.device)
        slots = torch.arange(joint.shape[0], device=joint.device)
        decay = self.decay(layer, state.new_zeros(self.heads))
        given = *(parts[name] for name in "qkva"), decay, state, Sequences(slots, 0 * slots)
        return linear_attention_prompt.reference(*given, **OPTIONS).flatten(2), state


@dataclass(frozen=True)
class LightningSpec(StateSpec):
    """The second projection is the gate's. norm: of what all heads give. gate: its activation, a name of GATES.

    rates: how fast heads decay. Stock holds what it makes of them beside them, so that all are rounded by a cast.
    """

    formula: LightningFormula
    norm: NormSpec
    gate: str
    rates: torch.Tensor = field(repr=False, compare=False)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return (self.norm,)

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        kept = layer.kept
        if kept is None or kept.state is None or kept.inputs is not None or kept.state.dim() != 4:
            return None
        for first, second, norm, out, gate in _endings(layer):
            for formula in _formulas(layer, first, norm):
                calls = first, second, norm, out
                rates = _tensor(layer.layer, formula.rate).detach().clone()
                if layer.known is not None or _holds_for_long(layer, formula, gate, calls):
                    return cls.understood(layer, [first, second], out, formula, norm_spec(layer, norm), gate, rates)
        raise NotUnderstood("its state, or what it gives, is of another formula")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundLightningAttention":
        return BoundLightningAttention(kernels, layer, self)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> StateShape:
        return StateShape(self.formula[:3], None, dtype, device)


def _tensor(layer: nn.Module, name: str) -> torch.Tensor:
    """A parameter or a buffer."""
    path, _, last = name.rpartition(".")
    module = layer.get_submodule(path)
    found = module._parameters.get(last, module._buffers.get(last))
    if found is None:
        raise NotUnderstood(f"{name} is gone")
    return found


def _endings(layer: LayerRecord) -> Iterator[tuple[Call, Call, Call, Call, str]]:
    """The calls of two projections of one input, of a norm, and of the last projection. That is given what the norm
    gave, times an activation of what the second projection gave. And the name of the activation.
    """
    assert layer.kept is not None
    calls = [call for call in layer.inside(layer.kept.attention) if call.alone and call.made is not None]
    linear = [call for call in calls if multiplies(call.module)]
    for norm, second, out in product((call for call in calls if normlike(layer, call)), linear, linear):
        if not norm.output.held.shape == second.output.held.shape == out.input.held.shape:
            continue
        for name, activation in GATES.items():
            if agree(norm.output.held * activation(second.output.held), out.input.held, slack=2.0):
                for first in (call for call in linear if call is not second and call.input.same(second.input)):
                    yield first, second, norm, out, name


def _formulas(layer: LayerRecord, first: Call, norm: Call) -> Iterator[LightningFormula]:
    """Those with which the state that was seen, and what the norm was given, come from a projection."""
    kept, core = layer.kept, norm.input.held
    assert kept is not None and kept.state is not None
    rows, heads, key_dim, value_dim = kept.state.shape
    joint = first.output.held
    if joint.dim() != 3 or joint.shape[-1] != heads * (2 * key_dim + value_dim) or joint.shape[0] != rows:
        return
    attention = kept.attention
    held = (*attention._parameters.items(), *attention._buffers.items())
    rates = [f"{layer.name(attention)}.{n}" for n, t in held if t is not None and t.numel() == heads]
    positive = [name for name in rates if bool((_tensor(layer.layer, name) > 0).all())]
    slack = 2.0 * bound(FORMULA, joint.dtype)
    for rate, by_head, activation in product(positive, (True, False), ("silu", None, *ACTIVATIONS)):
        found = LightningFormula(heads, key_dim, value_dim, by_head, activation, rate)
        got, state = found.attended(layer.layer, joint)
        same = agree(got, core.reshape(rows, joint.shape[1], -1), slack=2.0)
        if same and agree(state, kept.state, slack=slack / bound(FORMULA, kept.state.dtype)):
            yield found


def _holds_for_long(
    layer: LayerRecord, formula: LightningFormula, gate: str, calls: tuple[Call, Call, Call, Call]
) -> bool:
    """Whether stock gives the same of a text of several blocks, of whatever number its module holds."""
    assert layer.kept is not None
    attention = layer.kept.attention
    call = next(call for call in layer.calls if call.module is attention)
    block = max((n for n in vars(attention).values() if type(n) is int and n <= LONGEST), default=1)
    x = call.input.held
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(x.shape[0] * x.shape[1], (1, 2 * block + 3), generator=generator, device="cpu")
    text = x.flatten(0, 1)[places.to(x.device)]

    def put(value: Any) -> Any:
        return text if value is call.input.tensor else None if isinstance(value, Cache) else value

    got = attention(*map(put, call.args), **{name: put(value) for name, value in call.kwargs.items()})
    first, second, norm, out = (one.module for one in calls)
    core, _ = formula.attended(layer.layer, first(text))
    wanted = out(norm(core) * GATES[gate](second(text)))
    return agree(wanted, got[0] if isinstance(got, tuple) else got, slack=4.0)


class BoundLightningAttention(BoundLinearAttention):
    """One lightning attention with the tensors it reads."""

    spec: LightningSpec  # type: ignore[assignment]  # of the same make, without what belongs to a convolution

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: LightningSpec):
        self.spec, self.layer = spec, layer
        self.projections = BoundProjections(layer, spec.projections, stack=False)
        self.norm = BoundNorm(kernels, layer, spec.norm)
        rates = _tensor(layer, spec.formula.rate)
        if rates.dtype != spec.rates.dtype or not torch.equal(rates, spec.rates.to(rates.device)):
            raise NotUnderstood("how fast its heads decay was rounded or changed since")
        self.zeros = rates.new_zeros(spec.formula.heads, dtype=STATE)

    @property
    def decay(self) -> Decay:
        """Of prompts and steps."""
        return self.spec.formula.decay(self.layer, self.zeros)

    decay_of_steps = decay

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        (first, second), formula = self.projections, self.spec.formula
        parts = formula.parts(first(kernels, h, activation=formula.activation)) | {"gate": second(kernels, h)}
        return self._attended(kernels, parts, step.states(self.spec.index))

    def _tokens(self, kernels: Kernels, parts: TokenParts, states: RowStates, sequences: AnySequences) -> torch.Tensor:
        given = *(parts[name] for name in "qkva"), self.decay, states.state, sequences
        return self._gated(kernels, kernels.linear_attention_prompt(*given, **OPTIONS).flatten(2), parts["gate"])

    def _token(
        self, kernels: Kernels, parts: TokenParts, states: RowStates, sequences: AnySequences, decay: Decay
    ) -> torch.Tensor:
        given = *(parts[name] for name in "qkva"), decay, states.state, sequences
        return self._gated(kernels, kernels.linear_attention_step(*given, **OPTIONS), parts["gate"])

    def _gated(self, kernels: Kernels, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """(..., heads * Dv)."""
        norm, activation = self.norm.norm, self.spec.gate
        if norm is None or norm.centered or norm.bias is not None:
            return self.norm(y) * GATES[activation](gate)
        return kernels.rms_norm(y, norm.weight, norm.eps, offset=norm.offset, gate=Gate(gate, activation, False))
