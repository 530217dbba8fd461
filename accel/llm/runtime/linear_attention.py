"""Linear attention over a state of fixed size, found by comparing with a record: gated delta rule and state space.

Projections of the input give queries, keys and values, which go through a causal convolution, and decays, strengths and
gates. A rule updates the state with each token: Yang et al., "Gated Delta Networks", 2024; Dao and Gu, "Mamba-2", 2024.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, permutations, product
from typing import NamedTuple

import torch
from accel_kernels import Convolution, Decay, GatedNorm, Sequences, causal_convolution, rms_norm
from accel_kernels import linear_attention_prompt as prompt
from accel_kernels.norm.rms_norm import GATES, Gate
from accel_kernels.recurrent.linear_attention_step import gated_norm
from torch import nn

from accel.comparison import agree
from accel.llm.kv_cache.shape import StateShape
from accel.llm.recording.record import Call, Kept, LayerRecord, NotUnderstood, Record
from accel.llm.runtime.attention import AttentionSpec, UnderstoodAttention
from accel.llm.runtime.columns import Columns, places, strided
from accel.llm.runtime.part import BoundLinear, NormedInput, part_product, stacked
from accel.llm.runtime.step import Step
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings

DELTA, SPACE = "gated delta rule", "state space"
ORDER = {DELTA: "qkv", SPACE: "vkq"}  # of the channels of the convolution
KEY_EPS = 1e-6  # below the square root of a key's length, in all that divide by it


class Heads(NamedTuple):
    """keys: heads of queries and keys, each for `repeat` heads of values. key_dim, value_dim: sizes of a head."""

    keys: int
    repeat: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        return self.keys * self.repeat

    def channels(self, part: str) -> int:
        """Of all heads of "q", "k" or "v"."""
        return self.values * self.value_dim if part == "v" else self.keys * self.key_dim


class OutputNorm(NamedTuple):
    """The norm of what the rule gives, with a gate. activation: of the gate, a name of GATES; first: it multiplies the
    norm's input. groups: parts of all values with a norm of their own. rounded: see `GatedNorm`.
    """

    name: str
    weight: str
    eps: float
    activation: str
    first: bool
    groups: int
    rounded: bool


@dataclass(frozen=True)
class LinearSpec(AttentionSpec):
    """columns: where the heads of q, k, v, gate, a and b lie in the outputs of all projections, side by side.

    rule: DELTA or SPACE. convolution: a Conv1d, and its activation. a_log, bias, skip: names of parameters. scale, and
    key_eps, limits, beta_scale: as the operations of linear attention take them.
    """

    rule: str
    heads: Heads
    columns: tuple[tuple[str, Columns], ...]
    convolution: str
    taps: int
    activation: str | None
    a_log: str
    bias: str
    skip: str | None
    limits: tuple[float, float]
    scale: float
    key_eps: float | None
    beta_scale: float
    norm: OutputNorm

    @property
    def left_padded(self) -> bool:
        return True

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        kept = layer.kept
        if kept is None or kept.state is None or kept.inputs is None or kept.state.dim() != 4:
            return None
        calls = layer.inside(kept.attention)
        for norm in calls:
            if len([one for one in (*norm.args, *norm.kwargs.values()) if isinstance(one, torch.Tensor)]) == 2:
                out = next((c for c in calls if c.alone and c.input.same(norm.output)), None)
                if out is not None:
                    return cls._around(layer, kept, calls, norm, out)
        raise NotUnderstood("no gated norm before its last projection")

    @classmethod
    def _around(
        cls, layer: LayerRecord, kept: Kept, calls: list[Call], norm: Call, out: Call
    ) -> UnderstoodAttention:
        flat = [c for c in calls if c.alone and c.made is not None and c.output.held.dim() == 3 and c is not out]
        projections = [c for c in flat if c.input.same(flat[0].input)] if flat else []
        if not projections:
            raise NotUnderstood("no projections of the input")
        finder = _Finder(layer, kept, projections, norm, out)
        found = next(finder.formulas(), None)
        if found is None:
            raise NotUnderstood("its queries, keys, values or its state are of another formula")
        own = layer.name(kept.attention), plain_settings(kept.attention)
        names = tuple(layer.name(call.module) for call in projections)
        return UnderstoodAttention(
            cls(*own, names, layer.name(out.module), kept.place, None, **found), projections[0], out
        )

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundLinearAttention":
        return BoundLinearAttention(layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> StateShape:
        heads = self.heads
        channels = sum(map(heads.channels, "qkv"))
        sizes = (heads.values, *self._turned((heads.key_dim, heads.value_dim)))
        return StateShape(sizes, (self.taps, channels), dtype, device)

    def _turned(self, pair: tuple) -> tuple:
        """Keys before values, or after them where the rule of the library keeps them so."""
        return pair if self.rule == DELTA else pair[::-1]


class _Finder:
    """Candidates for the formula of a record, compared with what it holds."""

    def __init__(self, layer: LayerRecord, kept: Kept, projections: Sequence[Call], norm: Call, out: Call):
        self.layer, self.kept, self.norm, self.out = layer, kept, norm, out
        self.joint = torch.cat([call.output.held for call in projections], -1)
        gate = next(one for one in (*norm.args, *norm.kwargs.values()) if isinstance(one, torch.Tensor) and
                    one is not norm.input.tensor)
        self.gate = gate.reshape(*self.joint.shape[:2], -1)
        self.core = norm.input.held.reshape(*self.joint.shape[:2], -1)
        called = [call.module for call in (*projections, norm, out)]
        convolutions = [m for m in kept.attention.modules() if isinstance(m, nn.Conv1d)]
        self.convolution = convolutions[0] if len(convolutions) == 1 else None
        beside = {id(p) for m in (*called, *convolutions) for p in m.parameters()}
        self.parameters = [p for p in kept.attention.parameters() if id(p) not in beside]

    def formulas(self) -> Iterator[dict]:
        convolution, inputs = self.convolution, self.kept.inputs
        if convolution is None or inputs is None or convolution.groups != inputs.shape[1] != 1:
            return
        mixed = places(inputs.transpose(1, 2), self.joint)
        gate = places(self.gate, self.joint)
        if mixed is None or gate is None:
            return
        rest = torch.ones(self.joint.shape[-1], dtype=torch.bool)
        rest[mixed], rest[gate] = False, False
        for rule in (DELTA, SPACE):
            for heads in self._heads(rule, inputs.shape[1]):
                for columns in _columns(rule, heads, mixed, gate, rest.nonzero().flatten()):
                    yield from self._formulas(rule, heads, columns)

    def _heads(self, rule: str, channels: int) -> Iterator[Heads]:
        assert self.kept.state is not None
        values, *pair = self.kept.state.shape[1:]
        key_dim, value_dim = pair if rule == DELTA else pair[::-1]
        keys, rest = divmod(channels - values * value_dim, 2 * key_dim)
        if rest == 0 and keys > 0 and values % keys == 0:
            yield Heads(keys, values // keys, key_dim, value_dim)

    def _formulas(self, rule: str, heads: Heads, columns: dict[str, Columns]) -> Iterator[dict]:
        parameters = [p for p in self.parameters if p.numel() == heads.values]
        names = [self.layer_name(p) for p in parameters]
        wanted = 2 if rule == DELTA else 3
        limits = [(0.0, float("inf")), *_limits(self.kept.attention)]
        # Of parameters that hold the same numbers, by their usual names.
        picks = sorted(permutations(range(len(parameters)), wanted), key=lambda pick: _unlike(pick, names))
        for pick, limit, beta, activation in product(picks, limits, (1.0, 2.0), ("silu", None)):
            if rule == SPACE and beta != 1.0:
                continue
            formula = {
                "rule": rule, "heads": heads, "columns": tuple(columns.items()), "activation": activation,
                "convolution": self.layer.name(self.convolution), "taps": self.convolution.kernel_size[0],
                "a_log": names[pick[0]], "bias": names[pick[1]], "skip": None if rule == DELTA else names[pick[2]],
                "limits": limit, "scale": heads.key_dim**-0.5 if rule == DELTA else 1.0,
                "key_eps": KEY_EPS if rule == DELTA else None, "beta_scale": beta,
            }  # fmt: skip
            if self._holds(formula):
                for norm in self._norms(heads):
                    yield formula | {"norm": norm}

    def layer_name(self, parameter: nn.Parameter) -> str:
        return next(name for name, one in self.layer.layer.named_parameters() if one is parameter)

    def _holds(self, formula: dict) -> bool:
        """Whether it gives the result and the state that were seen."""
        rows, tokens = self.joint.shape[:2]
        heads, state = formula["heads"], self.kept.state
        kept = torch.zeros(rows, heads.values, heads.key_dim, heads.value_dim, device=state.device)
        window = self.joint.new_zeros(rows, formula["taps"], self.kept.inputs.shape[1])
        tensors = {n: self.layer.layer.get_parameter(formula[n]) for n in ("a_log", "bias", "skip") if formula[n]}
        positions = torch.zeros(rows, dtype=torch.int64, device=state.device)
        sequences = Sequences(torch.arange(rows, device=state.device), positions)
        got = _attended(formula, self.joint, self.convolution, tensors, kept, window, sequences, plain=True)
        kept = kept if formula["rule"] == DELTA else kept.transpose(2, 3)
        return agree(got, self.core) and agree(kept, state.float(), slack=2.0)

    def _norms(self, heads: Heads) -> Iterator[OutputNorm]:
        module, parameters = self.norm.module, list(self.norm.module.named_parameters(recurse=False))
        if len(parameters) != 1:
            return
        (name, weight), wanted = parameters[0], self.norm.output.held
        whole = weight.numel() != heads.value_dim
        if weight.numel() not in (heads.value_dim, heads.values * heads.value_dim):
            return
        floats = [value for value in vars(module).values() if type(value) is float]
        groups = dict.fromkeys((heads.keys, 1, heads.values)) if whole else (heads.values,)
        found = []
        for eps, activation, first, parts in product(floats, GATES, (False, True), groups):
            for rounded in (True, False):
                one = OutputNorm(self.layer.name(module), name, eps, activation, first, parts, rounded)
                got = _normed(one, self.core, self.gate, weight, heads).reshape(wanted.shape)
                if agree(got, wanted):
                    found.append((not torch.equal(got, wanted), len(found), one))
        yield from (one for _, _, one in sorted(found, key=lambda each: each[:2]))


def _unlike(pick: tuple[int, ...], names: list[str]) -> int:
    """How many names of a_log, bias and skip are not what they are usually called."""
    usual = ("a_log", "bias", "d")
    return sum(not names[place].lower().endswith(name) for place, name in zip(pick, usual, strict=False))


def _limits(attention: nn.Module) -> list[tuple[float, float]]:
    """Pairs of numbers between which steps in time may be held."""
    pairs = (v for v in vars(attention).values() if isinstance(v, tuple | list) and len(v) == 2)
    return [(float(low), float(high)) for low, high in pairs if type(low) is float and type(high) is float]


def _columns(
    rule: str, heads: Heads, mixed: torch.Tensor, gate: torch.Tensor, rest: torch.Tensor
) -> Iterator[dict[str, Columns]]:
    """Where all parts lie; of the columns that are left, in the orders that occur."""
    found: dict[str, Columns | None] = {}
    start = 0
    for part in ORDER[rule]:
        repeat, dim = (heads.repeat, heads.value_dim) if part == "v" else (1, heads.key_dim)
        size = heads.channels(part)
        found[part] = strided(mixed[start : start + size].view(heads.keys, repeat, dim))
        start += size
    if gate.numel() != heads.channels("v"):
        return
    found["gate"] = strided(gate.view(heads.keys, heads.repeat, heads.value_dim))
    one = (heads.keys, heads.repeat, 1)
    if rule == SPACE:
        candidates = [(rest,)] if rest.numel() == heads.values else []
    elif rest.numel() == 2 * heads.values:
        by_head = rest.view(heads.keys, 2, heads.repeat).unbind(1)
        candidates = [*permutations(rest.view(2, -1)), *permutations(by_head)]
    else:
        candidates = []
    for parts in candidates:
        placed = {name: strided(part.reshape(one)) for name, part in zip("ab", parts, strict=False)}
        every = found | placed
        if None not in every.values():
            yield every  # type: ignore[misc]
