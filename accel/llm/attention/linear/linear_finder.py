"""Looks for the formula of linear attention in a recorded layer: candidates, compared with what the record holds."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, permutations, product

import torch
from accel_kernels import Sequences, causal_convolution, linear_attention_prompt
from accel_kernels.norm.rms_norm import GATES
from torch import nn

from accel.comparison import agree
from accel.llm.attention.linear.linear_formula import (
    DELTA,
    ORDER,
    SPACE,
    UNLIMITED,
    Heads,
    LinearFormula,
    OutputNorm,
    Pair,
    attended_prompt,
    parts_of,
)
from accel.llm.attention.projections import HeadColumns, places, strided
from accel.llm.recording.record import Call, KeptState, LayerRecord
from accel.quantization.experts import holds_numbers
from accel.tolerances import FORMULA, bound

CANCELLED = 2e-3  # of a result, may be off where decays are sums of large numbers; without a limit it is 0.07


class FormulaFinder:
    """Looks for the formula of one record. calls: of all modules that belong to it; projections: those that were given
    the same input. norm: the call with a gate, of what the rule gave; None where the gate multiplies that and `out` is
    given it. rounded: see `Decay`.
    """

    def __init__(
        self,
        layer: LayerRecord,
        kept: KeptState,
        calls: Sequence[Call],
        projections: Sequence[Call],
        norm: Call | None,
        out: Call,
        rounded: bool,
    ):
        self.layer, self.kept, self.norm, self.rounded = layer, kept, norm, rounded
        linear = [call for call in calls if call.alone and call.made is not None and multiplies(call.module)]
        seconds = [call for call in linear if any(one.output.same(call.input) for one in projections)]
        every = [*projections, *seconds]
        self.joint = self.given = torch.cat([call.output.held for call in every], -1)
        ends = list(accumulate(call.output.held.shape[-1] for call in every))
        spans = list(zip([0, *ends], ends, strict=False))
        self.direct = ends[len(projections) - 1]  # columns
        taken = [next(n for n, one in enumerate(projections) if one.output.same(call.input)) for call in seconds]
        given = zip(seconds, taken, spans[len(projections) :], strict=True)
        self.pairs = tuple(Pair(layer.name(call.module), spans[first], span) for call, first, span in given)
        seen: list[torch.Tensor | None] = [None, None, out.input.held]
        if norm is not None:
            seen = [next(t for t in norm.tensors if t is not norm.input.tensor), norm.input.held, norm.output.held]
        self.gate, self.core, wanted = (None if t is None else t.reshape(*self.joint.shape[:2], -1) for t in seen)
        assert wanted is not None
        self.wanted = wanted
        core = self.joint if self.core is None else self.core
        self.slack = bound(FORMULA, self.joint.dtype) / bound(FORMULA, core.dtype)  # what is wide was rounded too
        convolutions = [m for m in kept.attention.modules() if isinstance(m, nn.Conv1d)]
        called = (call.module for call in calls)
        beside = {id(p) for module in (*called, *convolutions) for p in module.parameters()}
        self.convolution = convolutions[0] if len(convolutions) == 1 else None
        held = [(name, t) for name, t in layer.layer.named_buffers() if t.dtype == self.joint.dtype and not self.pairs]
        self.multipliers = [name for name, t in held if t.dim() and t.numel() == t.shape[-1] == self.direct]
        self.parameters = {name: p for name, p in layer.layer.named_parameters() if id(p) not in beside}

    def formulas(self) -> Iterator[LinearFormula]:
        """Those that give the result and the state that were seen."""
        convolution, inputs = self.convolution, self.kept.inputs
        assert inputs is not None and self.kept.state is not None
        channels = inputs.shape[1]
        if convolution is None or convolution.groups != channels or convolution.out_channels != channels:
            return
        for multiplier in (*self.multipliers, None):
            self.joint = self.given if multiplier is None else self.given * self.layer.layer.get_buffer(multiplier)
            mixed = places(inputs.transpose(1, 2), self.joint)
            gate = None if self.gate is None else places(self.gate, self.joint)
            if mixed is not None and int(mixed.max()) < self.direct and (gate is None) == (self.gate is None):
                yield from self._with(mixed, gate, multiplier)

    def _with(self, mixed: torch.Tensor, gate: torch.Tensor | None, multiplier: str | None) -> Iterator[LinearFormula]:
        """mixed, gate: columns of what goes into the convolution, and of the gate where that is known."""
        assert self.kept.state is not None
        left = torch.ones(self.joint.shape[-1], dtype=torch.bool, device="cpu")
        left[mixed] = False
        if gate is not None:
            left[gate] = False
        for pair in self.pairs:
            left[slice(*pair.taken)] = False
        for rule in (DELTA, SPACE):
            values, *sizes = self.kept.state.shape[1:]
            key_dim, value_dim = sizes if rule == DELTA else sizes[::-1]
            keys, rest = divmod(len(mixed) - values * value_dim, 2 * key_dim)
            if rest or keys < 1 or values % keys or (gate is not None and gate.numel() != values * value_dim):
                continue
            heads = Heads(keys, values // keys, key_dim, value_dim)
            for columns in _columns(rule, heads, mixed, gate, left.nonzero().flatten()):
                yield from filter(self._holds, self._candidates(rule, heads, columns, multiplier))

    def _candidates(
        self, rule: str, heads: Heads, columns: dict[str, HeadColumns], multiplier: str | None
    ) -> Iterator[LinearFormula]:
        assert self.convolution is not None
        of_each = self.kept.attention.modules()
        held = [(float(low), float(high)) for low, high in _pairs(self.kept.attention)]
        below = [x for module in of_each for x in vars(module).values() if _is_float(x) and x < 0]
        decays = [*((limits, None) for limits in (*held, UNLIMITED)), *((UNLIMITED, least) for least in below)]
        sizes = heads.values, heads.values * columns["a"].sizes[2]
        names, beside = ([name for name, p in self.parameters.items() if p.numel() == size] for size in sizes)
        of_channels = sizes[0] < sizes[1]
        found = product(names, beside) if of_channels else permutations(names, 2 if rule == DELTA else 3)
        # Of parameters that hold the same numbers, those with the usual names.
        picks = sorted(found, key=_unusual)
        betas = (1.0, 2.0) if rule == DELTA else (1.0,)
        given = self.layer.name(self.convolution), self.convolution.kernel_size[0]
        wide = self.core is not None and self.core.dtype != self.joint.dtype
        for pick, (limits, least), beta, activation in product(picks, decays, betas, ("silu", None)):
            a_log, bias, *skips = pick
            yield LinearFormula(
                rule, heads, tuple(columns.items()), *given, activation, a_log, bias, skips[0] if skips else None,
                limits, beta, wide, self.rounded or rule == SPACE, least, self.pairs, multiplier,
            )  # fmt: skip

    def _holds(self, formula: LinearFormula) -> bool:
        joint, state, heads = self.joint, self.kept.state, formula.heads
        assert state is not None
        rows, device = joint.shape[0], joint.device
        kept = torch.zeros(rows, heads.values, heads.key_dim, heads.value_dim, device=device)
        window = joint.new_zeros(rows, formula.taps, formula.channels)
        slots = torch.arange(rows, device=device)
        parts = parts_of(formula, joint)
        tensors, sequences = formula.tensors(self.layer.layer), Sequences(slots, 0 * slots)
        ops = causal_convolution.reference, linear_attention_prompt.reference
        got = attended_prompt(*ops, formula, tensors, parts, kept, window, sequences)
        kept = kept if formula.rule == DELTA else kept.transpose(2, 3)
        self.got = got.flatten(2)
        slack = 2.0 * bound(FORMULA, joint.dtype) / bound(FORMULA, state.dtype)
        same = self.core is None or agree(self.got, self.core, slack=self._allowed() * self.slack)
        return same and agree(kept, state, slack=self._allowed() * slack)

    def _allowed(self) -> float:
        """Where all numbers are large, sums of decays cancel."""
        return 1.0 if self.layer.known is None else max(1.0, CANCELLED / bound(FORMULA, self.joint.dtype))

    def norms(self, formula: LinearFormula) -> list[OutputNorm]:
        """Those that give what was seen, the nearest first. formula: the last of `formulas`."""
        heads, wanted = formula.heads, self.wanted
        if self.norm is None or self.core is None or self.gate is None:
            gate = parts_of(formula, self.joint)["gate"].flatten(2)
            fit = (name for name, act in GATES.items() if agree(self.got * act(gate), wanted, slack=self._allowed()))
            return [OutputNorm("", "", 0.0, name, False, heads.values, False) for name in fit]
        module = self.norm.module
        parameters = dict(module.named_parameters(recurse=False))
        found: list[tuple[bool, OutputNorm]] = []
        for (name, weight), eps in product(parameters.items(), filter(_is_float, vars(module).values())):
            if weight.numel() not in (heads.value_dim, heads.values * heads.value_dim) or len(parameters) > 1:
                continue
            whole = weight.numel() == heads.values * heads.value_dim != heads.value_dim
            groups = tuple(dict.fromkeys((heads.keys, 1, heads.values))) if whole else (heads.values,)
            for activation, first, parts, rounded in product(GATES, (False, True), groups, (True, False)):
                one = OutputNorm(self.layer.name(module), name, eps, activation, first, parts, rounded)
                got = _normed(one, self.core, self.gate, weight)
                if agree(got, wanted, slack=self.slack):
                    found.append((not torch.equal(got, wanted), one))
        return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def multiplies(module: nn.Module) -> bool:
    """Whether it has a matrix, here or inside."""
    return any(p.dim() >= 2 for p in module.parameters()) or any(map(holds_numbers, module.modules()))


def _normed(norm: OutputNorm, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In torch, (rows, tokens, heads * Dv)."""
    y, factor = x.float(), GATES[norm.activation](gate.float())
    y = (y * factor if norm.first else y).unflatten(-1, (norm.groups, -1))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.eps)
    y = y.unflatten(-1, (-1, weight.numel())) if weight.numel() <= y.shape[-1] else y.flatten(2).unsqueeze(2)
    y = (weight * y.to(x.dtype) if norm.rounded else weight.float() * y).reshape(x.shape)
    return (y if norm.first else y * factor).to(x.dtype)


def _columns(
    rule: str, heads: Heads, mixed: torch.Tensor, gate: torch.Tensor | None, rest: torch.Tensor
) -> Iterator[dict[str, HeadColumns]]:
    """Where all parts lie; of those columns that are left, in the orders that occur."""
    found: dict[str, HeadColumns | None] = {}
    cut = mixed.split([heads.channels(part) for part in ORDER[rule]])
    for part, index in zip(ORDER[rule], cut, strict=True):
        found[part] = strided(index.view(heads.keys, heads.repeat if part == "v" else 1, -1))
    names, few = ("a", "b"), heads.values
    candidates: list[tuple[torch.Tensor, ...]] = []
    if gate is not None:
        found["gate"] = strided(gate.view(heads.keys, heads.repeat, -1))
    elif rule == SPACE and rest.numel() == few * (heads.value_dim + 1):
        names, candidates = ("a", "gate"), [(rest[-few:], rest[:-few]), (rest[:few], rest[few:])]
    if gate is None:
        pass
    elif rule == SPACE and rest.numel() == heads.values:
        candidates = [(rest,)]
    elif rule == DELTA and rest.numel() == 2 * heads.values:
        by_key = rest.view(heads.keys, 2, heads.repeat).unbind(1)
        candidates = [*permutations(rest.view(2, -1).unbind()), *permutations(by_key)]
    elif rule == DELTA and rest.numel() == heads.values * (heads.key_dim + 1):
        candidates = [(rest[few:], rest[:few]), (rest[:-few], rest[-few:])]
    for parts in candidates:
        beside = {n: strided(part.reshape(heads.keys, heads.repeat, -1)) for n, part in zip(names, parts, strict=False)}
        every = {name: columns for name, columns in (found | beside).items() if columns is not None}
        if len(every) == len(found) + len(beside):
            yield every


def _unusual(pick: tuple[str, ...]) -> int:
    """How many names are not what a_log, bias and skip are usually called."""
    return sum(not name.lower().endswith(usual) for name, usual in zip(pick, ("a_log", "bias", "d"), strict=False))


def _pairs(attention: nn.Module) -> Iterator[tuple[float, float]]:
    """Pairs of numbers among its attributes, between which steps in time may be held."""
    for value in vars(attention).values():
        if isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_float, value)):
            yield tuple(value)


def _is_float(value: object) -> bool:
    return type(value) is float
