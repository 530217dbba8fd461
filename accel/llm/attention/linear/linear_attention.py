"""Linear attention, over a state of fixed size a row: a layer's spec, and the layer with the tensors it reads.

Projections of the input give queries, keys and values, which go through a causal convolution, and decays, strengths and
gates. A rule updates the state with each token. A step is one product, one kernel, and the last projection.
"""

from dataclasses import dataclass

import torch
from accel_kernels import Convolution, Decay, GatedNorm, RowStates, Sequences
from accel_kernels.attention.paged.ragged import Ragged
from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.norm.rms_norm import Gate
from accel_kernels.recurrent.recurrence import RowSequences
from torch import nn

from accel.llm.attention.attention import StateSpec, UnderstoodAttention
from accel.llm.attention.linear.linear_finder import FormulaFinder, multiplies
from accel.llm.attention.linear.linear_formula import (
    DELTA,
    UNLIMITED,
    LinearFormula,
    OutputNorm,
    attended_prompt,
    of_steps,
    parts_of,
)
from accel.llm.kv_cache.shape import StateShape
from accel.llm.parts.part import BoundLinear, BoundProjections, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels

TokenParts = dict[str, torch.Tensor]  # what projections give of tokens, by name
AnySequences = Sequences | RowSequences


@dataclass(frozen=True)
class LinearSpec(StateSpec):
    """A rule over a state, and the norm of what it gives. factor: by which all that projections give is multiplied."""

    formula: LinearFormula
    norm: OutputNorm
    factor: float = 1.0

    @property
    def limits_prompts(self) -> bool:
        return self.formula.limits != UNLIMITED

    @property
    def linears(self) -> tuple[str, ...]:
        return (*super().linears, *(pair.name for pair in self.formula.pairs))

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        kept = layer.kept
        if kept is None or kept.state is None or kept.inputs is None or kept.state.dim() != 4:
            return None
        calls = layer.inside(kept.attention)
        gated = (call for call in calls if len(call.tensors) == 2 and call.made is not None)
        pairs = ((norm, out) for norm in gated for out in calls if out.alone and _follows(out, norm))
        norm, out = next(pairs, (None, None))
        if norm is None or out is None:
            out = next((call for call in reversed(calls) if call.alone and multiplies(call.module)), None)
            if out is None:
                raise NotUnderstood("nothing projects what its state gives")
        flat = [call for call in calls if call is not out and call.alone and call.made is not None]
        tokens = flat[0].input.held.shape[:-1]
        gates = [call for call in flat if call.output.held.shape[:-1] != tokens and layer.inside(call.module)]
        inside = [one for call in gates for one in layer.inside(call.module)]  # of a module of its own for decays
        flat = [call for call in (*flat, *inside) if call.alone and call.made is not None]
        flat = [call for call in flat if call.output.held.shape[:-1] == tokens]
        projections = [call for call in flat if call.input.same(flat[0].input)]
        calls = [*(call for call in calls if all(call is not gate for gate in gates)), *inside]
        rounded = bool(gates) and all(gate.output.held.dtype == flat[0].output.held.dtype for gate in gates)
        finder = FormulaFinder(layer, kept, calls, projections, norm, out, rounded)
        for formula in finder.formulas():
            for found in finder.norms(formula):
                return cls.understood(layer, projections, out, formula, found)
        raise NotUnderstood("its state, or what it gives, is of another formula")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundLinearAttention":
        return BoundLinearAttention(layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> StateShape:
        heads = self.formula.heads
        pair = (heads.key_dim, heads.value_dim) if self.formula.rule == DELTA else (heads.value_dim, heads.key_dim)
        return StateShape((heads.values, *pair), (self.formula.taps, self.formula.channels), dtype, device)


def _follows(call: Call, norm: Call) -> bool:
    """Whether a call was given what a norm gave, perhaps rounded."""
    given, made = call.input.held, norm.output.held
    return given.numel() == made.numel() and torch.equal(given, made.reshape(given.shape).to(given.dtype))


class BoundLinearAttention:
    """One linear attention with the tensors it reads."""

    def __init__(self, layer: nn.Module, spec: LinearSpec, stack: bool):
        self.spec = spec
        self.projections = BoundProjections(layer, spec.projections, stack)
        self.seconds = [BoundLinear(layer.get_submodule(pair.name)) for pair in spec.formula.pairs]
        self.weight: torch.Tensor | None = None
        if spec.norm.name:
            self.weight = layer.get_submodule(spec.norm.name).get_parameter(spec.norm.weight)
        self.tensors = spec.formula.tensors(layer)
        self.multiplier = None if spec.formula.multiplier is None else layer.get_buffer(spec.formula.multiplier)
        self.zero = None if self.multiplier is None else self.multiplier.new_zeros(())
        # Within the kernel of a step, where each head has a norm of its own with the gate behind it.
        of_heads = self.weight is not None and spec.norm.groups == spec.formula.heads.values
        self.inside = of_heads and not (spec.norm.first or spec.formula.wide)

    @property
    def decay(self) -> Decay:
        """Of prompts."""
        return self.tensors.decay

    @property
    def decay_of_steps(self) -> Decay:
        return of_steps(self.decay)

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        states, joint = step.states(self.spec.index), self.projected(kernels, h)
        taken = (NormedInput(joint[..., slice(*pair.taken)].contiguous()) for pair in self.spec.formula.pairs)
        seconds = (second(kernels, given) for second, given in zip(self.seconds, taken, strict=True))
        if self.spec.formula.rule != DELTA:  # the library keeps values before keys
            state, other = (None if t is None else t.transpose(2, 3) for t in (states.state, states.other_state))
            states = states._replace(state=state, other_state=other)
        return self._attended(kernels, parts_of(self.spec.formula, joint, *seconds), states)

    def _attended(self, kernels: Kernels, parts: TokenParts, states: RowStates) -> torch.Tensor:
        """(rows, new, K). parts: (rows, new, ...) each."""
        if (ragged := states.ragged) is not None:
            return self._ragged(kernels, parts, states, ragged)
        if parts["q"].shape[1] > 1:
            return self._tokens(kernels, parts, states, states.sequences())
        each = {name: part[:, 0] for name, part in parts.items()}
        # Stock takes the only token of a text for a prompt.
        decay = self.decay if states.is_prefill else self.decay_of_steps
        return self._token(kernels, each, states, states.sequences(), decay).unsqueeze(1)

    def _ragged(self, kernels: Kernels, parts: TokenParts, states: RowStates, ragged: Ragged) -> torch.Tensor:
        """Of sequences of different lengths in one row."""
        decodes = states.decodes(ragged)
        each = {name: part[0, : decodes.number] for name, part in parts.items()}
        if not ragged.most_prefills:
            return self._token(kernels, each, states, decodes, self.decay_of_steps).unsqueeze(0)
        prefills = states.prefills(ragged)
        limited = prefills.limited if self.spec.limits_prompts else None
        y = self._tokens(kernels, parts, states, prefills._replace(limited=limited))
        if decodes.number:
            found, tokens = self._token(kernels, each, states, decodes, self.decay_of_steps), y[0, : decodes.number]
            torch.where(decodes.slots[:, :1] < 0, tokens, found, out=tokens)
        return y

    def _tokens(self, kernels: Kernels, parts: TokenParts, states: RowStates, sequences: AnySequences) -> torch.Tensor:
        """(rows, tokens, K), zeros of tokens that do not count."""
        assert states.state is not None and states.window is not None
        ops = kernels.causal_convolution, kernels.linear_attention_prompt
        y = attended_prompt(*ops, self.spec.formula, self.tensors, parts, states.state, states.window, sequences)
        return self._normed(kernels, y.flatten(2), parts["gate"].flatten(2), parts["joint"].dtype)

    def _token(
        self, kernels: Kernels, parts: TokenParts, states: RowStates, sequences: AnySequences, decay: Decay
    ) -> torch.Tensor:
        """(sequences, K), of one token of each. parts: of these tokens, without a dimension for them."""
        formula, (weight, bias, _, skip) = self.spec.formula, self.tensors
        assert states.state is not None and states.window is not None
        q, k, v, gate, a = (parts[name] for name in ("q", "k", "v", "gate", "a"))
        norm = None
        if self.inside and self.weight is not None:
            norm = GatedNorm(gate, self.weight, self.spec.norm.eps, self.spec.norm.activation, self.spec.norm.rounded)
        y = kernels.linear_attention_step(
            q, k, v, a.squeeze(-1), decay, states.state, sequences, skip=skip, norm=norm, **formula.options,
            b=parts["b"].squeeze(-1) if "b" in parts else None,
            convolution=Convolution(weight, states.window, bias, formula.activation, formula.order),
        )  # fmt: skip
        if self.inside:
            return y
        return self._normed(kernels, y.unsqueeze(0), gate.flatten(1).unsqueeze(0), parts["joint"].dtype)[0]

    def projected(self, kernels: Kernels, h: NormedInput) -> torch.Tensor:
        """(rows, new, N): the outputs of all projections side by side, times multiplier and factor."""
        factor, multiplier = self.spec.factor, self.multiplier
        only, *others = self.projections
        if not others and h.x.shape[:-1].numel() <= MOST_ROWS and only.takes_wide(kernels):
            return only(kernels, h, scale=factor, modulation=None if multiplier is None else multiplier.view(1, -1))
        joint = self.projections.side_by_side(kernels, h)
        if multiplier is not None and self.zero is not None:
            return torch.addcmul(self.zero, joint, multiplier, value=factor)
        return joint if factor == 1.0 else joint * factor

    def _normed(self, kernels: Kernels, y: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        norm, heads = self.spec.norm, self.spec.formula.heads
        weight = self.weight
        if weight is None:
            return kernels.gated(gate, y.contiguous(), norm.activation).to(dtype)
        if weight.numel() < y.shape[-1]:  # of one head, and all have the same
            weight = weight.repeat(heads.values)
        by = Gate(gate, norm.activation, norm.first)
        return kernels.rms_norm(y, weight, norm.eps, groups=norm.groups, gate=by, dtype=dtype)
