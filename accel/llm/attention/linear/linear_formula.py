"""The formula of linear attention, and what it computes of a prompt.

Two rules are known: the gated delta rule, Yang et al., "Gated Delta Networks", 2024, with a decay of each channel Kimi
Linear, 2025; and that of state space models, Dao and Gu, "Transformers are SSMs", 2024 (Mamba-2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accel_kernels import Decay, Sequences
from accel_kernels.recurrent.recurrence import RowSequences
from torch import nn

from accel.llm.attention.projections import HeadColumns

DELTA, SPACE = "gated delta rule", "state space"
ORDER = {DELTA: "qkv", SPACE: "vkq"}  # of the channels of the convolution
UNLIMITED = (0.0, float("inf"))
KEY_EPS = 1e-6  # beside the square of a key's length, in all that divide by it


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


class Pair(NamedTuple):
    """A projection of what another gave. taken, given: from and to which column, of the outputs of all side by side."""

    name: str
    taken: tuple[int, int]
    given: tuple[int, int]


class LinearFormula(NamedTuple):
    """What one linear attention computes, but for its last norm and projection.

    columns: where the heads of q, k, v, gate, a and perhaps b lie in the outputs of all projections, side by side,
    behind which stand those of `pairs`.
    convolution: the name of a Conv1d with so many taps, and its activation. a_log, bias, skip: names of parameters.
    scale, key_eps, beta_scale: as the operations of linear attention take them; limits, lower_bound, rounded: as
    `Decay`. wide: the norm is given what the rule gives in float32, whatever the dtype of the input. multiplier: the
    name of a buffer by which the columns are multiplied first.
    """

    rule: str
    heads: Heads
    columns: tuple[tuple[str, HeadColumns], ...]
    convolution: str
    taps: int
    activation: str | None
    a_log: str
    bias: str
    skip: str | None
    limits: tuple[float, float]
    beta_scale: float
    wide: bool
    rounded: bool
    lower_bound: float | None
    pairs: tuple[Pair, ...]
    multiplier: str | None

    @property
    def order(self) -> str:
        return ORDER[self.rule]

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return sum(map(self.heads.channels, "qkv"))

    @property
    def options(self) -> dict[str, Any]:
        """What the operations take besides tensors."""
        more = {"beta_scale": self.beta_scale, "dtype": torch.float32 if self.wide else None}
        if self.rule == SPACE:
            return {"scale": 1.0, "key_eps": None} | more
        return {"scale": self.heads.key_dim**-0.5, "key_eps": KEY_EPS} | more

    def tensors(self, layer: nn.Module) -> "Tensors":
        """Those of a layer, as they lie now."""
        convolution = layer.get_submodule(self.convolution)._parameters
        weight, bias = convolution["weight"], convolution["bias"]
        assert weight is not None
        a_log, decay_bias = (layer.get_parameter(name).flatten() for name in (self.a_log, self.bias))
        if decay_bias.numel() > a_log.numel():
            decay_bias = decay_bias.view(a_log.numel(), -1)
        decay = Decay(a_log, decay_bias, self.lower_bound, self.limits, self.rounded)  # of prompts, see `of_steps`
        skip = None if self.skip is None else layer.get_parameter(self.skip).flatten()
        return Tensors(weight.squeeze(1), bias, decay, skip)


class Tensors(NamedTuple):
    """weight: (channels, taps), and bias: of the convolution. skip: as the operations take it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    decay: Decay
    skip: torch.Tensor | None


def of_steps(decay: Decay) -> Decay:
    """transformers holds the decay of a prompt between limits, and that of a single token between none."""
    return decay._replace(limits=UNLIMITED)


class OutputNorm(NamedTuple):
    """The RMS norm of what the rule gives, with a gate. weight: the name of that parameter of the module `name`.

    activation: of the gate, a name of GATES; first: it multiplies the norm's input, not its output. groups: the mean
    square is taken over each of so many equal parts. rounded: as of `GatedNorm`. name: "" for a gate and no norm.
    """

    name: str
    weight: str
    eps: float
    activation: str
    first: bool
    groups: int
    rounded: bool


def attended_prompt(
    convolve: Callable[..., torch.Tensor],
    attend: Callable[..., torch.Tensor],
    formula: LinearFormula,
    tensors: Tensors,
    parts: dict[str, torch.Tensor],
    state: torch.Tensor,
    window: torch.Tensor,
    sequences: Sequences | RowSequences,
) -> torch.Tensor:
    """What the rule gives of many tokens, (rows, tokens, heads, Dv), by these two operations. parts: see `parts_of`.

    state: (slots, heads, Dk, Dv) and window: (slots, taps, channels), which are read and written.
    """
    heads = formula.heads
    mixed = _side_by_side(formula, parts)
    x = convolve(mixed, tensors.weight, window, sequences, bias=tensors.bias, activation=formula.activation)
    shapes = {"v": (heads.keys, heads.repeat, heads.value_dim), "k": (heads.keys, heads.key_dim)}
    shapes["q"] = shapes["k"]
    cut = x.split([heads.channels(part) for part in formula.order], dim=-1)
    q, k, v = (dict(zip(formula.order, cut, strict=True))[part].unflatten(-1, shapes[part]) for part in "qkv")
    a, b = (parts[name].squeeze(-1) if name in parts else None for name in "ab")
    return attend(q, k, v, a, tensors.decay, state, sequences, b=b, skip=tensors.skip, **formula.options)


def _side_by_side(formula: LinearFormula, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The channels of the convolution, (rows, tokens, channels): a view where they lie so."""
    columns, place = dict(formula.columns), None
    for part in formula.order:
        one = columns[part]
        heads, repeats, channels = one.sizes
        dense = (heads == 1 or one.head == repeats * channels) and (repeats == 1 or one.repeat == channels)
        if not dense or place not in (None, one.first):
            return torch.cat([parts[name].flatten(2) for name in formula.order], -1)
        place = one.first + heads * repeats * channels
    return HeadColumns(columns[formula.order[0]].first, 0, 0, (1, 1, formula.channels)).of(parts["joint"]).flatten(2)


def parts_of(formula: LinearFormula, joint: torch.Tensor, *seconds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of (rows, tokens, columns): by part (rows, tokens, heads, repeats, channels), q and k without repeats.

    seconds: what the pairs give; without them it is in `joint`.
    """
    behind = [(pair.given[0], second) for pair, second in zip(formula.pairs, seconds, strict=bool(seconds))]
    parts = {}
    for name, columns in formula.columns:
        at, tensor = next((one for one in reversed(behind) if columns.first >= one[0]), (0, joint))
        parts[name] = columns._replace(first=columns.first - at).of(tensor)
    return parts | {"q": parts["q"].squeeze(3), "k": parts["k"].squeeze(3), "joint": joint}
