"""What positions do besides rotating: ALiBi's bias (Press et al. 2022), Llama 4's factor of queries of long texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from accel_kernels import KV
from accel_kernels.attention.paged.kv import LENGTH
from torch import nn
from transformers import PretrainedConfig

from accel.comparison import agree, factor
from accel.llm.parts.step import Step
from accel.llm.recording.record import LayerRecord

POSITIONS = "position_ids"


@dataclass(frozen=True)
class QueryScale:
    """1 + growth * log(1 + floor((position + first) / length)).

    counted: positions are how many tokens the cache holds before, padding among them; else the layer is given them.
    """

    growth: float
    length: float
    first: int
    counted: bool

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Of int64 positions, float32."""
        steps = torch.floor((positions.float() + self.first) / self.length)
        return self.growth * torch.log1p(steps) + 1.0

    @property
    def keyword(self) -> str | None:
        """Of its layer's call."""
        return None if self.counted else POSITIONS

    def of_step(self, step: Step, place: int, kwargs: dict, q: torch.Tensor) -> torch.Tensor:
        """(rows, new) float32, made once for all layers. q: (rows, new, heads, D). kwargs: of the layer."""
        kv, given = step.kvs[place], kwargs.get(POSITIONS)
        counted = self.counted and not (isinstance(kv, KV) and kv.ragged is not None)
        rows, new = q.shape[:2]

        def make() -> tuple[torch.Tensor]:
            positions = kv.metadata[LENGTH] + torch.arange(new, device=q.device) if counted else given
            assert positions is not None
            return (self.at(positions).expand(rows, new).contiguous(),)

        return step.angles(kv.metadata if counted else given, (self, rows), make)[0]


@dataclass(frozen=True)
class GivenScale:
    """The factors are handed to the layer by a keyword, (1 or rows, 1, new, 1)."""

    keyword: str

    def of_step(self, step: Step, place: int, kwargs: dict, q: torch.Tensor) -> torch.Tensor:
        """As of `QueryScale`."""
        rows, new, given = *q.shape[:2], kwargs[self.keyword]
        return step.angles(given, (self, rows), lambda: (given[:, 0, :, 0].float().expand(rows, new).contiguous(),))[0]


def given_scale(layer: LayerRecord, turned: torch.Tensor, wanted: torch.Tensor) -> GivenScale | None:
    """As `query_scale`."""
    rows, tokens = turned.shape[:2]
    for name, value in layer.call.named.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.shape in ((1, 1, tokens, 1), (rows, 1, tokens, 1)):
                if agree((turned * value.transpose(1, 2)).to(wanted.dtype), wanted):
                    return GivenScale(name)
    return None


def query_scale(layer: LayerRecord, turned: torch.Tensor, wanted: torch.Tensor) -> QueryScale | None:
    """The one that makes the queries that attention was given, both (rows, tokens, heads, D); None where none does.

    Its numbers are among those that the attention or its configuration holds. layer: of which a formula is known.
    """
    grown = (
        torch.tensor([factor(*one) for one in zip(turned.unbind(1), wanted.unbind(1), strict=True)], device="cpu") - 1.0
    )
    numbers = _numbers(layer.attention)
    known = layer.known.attention.q_scale
    for counted, positions in _positions(layer):
        if isinstance(known, QueryScale) and counted is not known.counted:
            continue
        for length, first in product((one for one in numbers if one > len(positions)), (0, 1)):
            unit = QueryScale(1.0, length, first, counted).at(positions) - 1.0
            found = factor(unit, grown)
            for named in (one for one in numbers if abs(one - found) <= 0.1 * one):
                scale = QueryScale(named, length, first, counted)
                made = turned * scale.at(positions)[:, None, None].to(turned.device)
                if all(agree(made[:, at].to(wanted.dtype), wanted[:, at]) for at in range(len(positions))):
                    return scale
    return None


def _positions(layer: LayerRecord) -> Iterator[tuple[bool, torch.Tensor]]:
    """Of the tokens of this run, (tokens,): as the cache counts them, and as the layer is told."""
    tokens = layer.cached.keys.shape[2]
    given = layer.call.named.get(POSITIONS)
    if isinstance(given, torch.Tensor) and given.shape[-1] == tokens and bool((given == given[:1]).all()):
        yield False, given.reshape(-1, tokens)[0].cpu()
    if layer.shown_length is not None:
        yield True, torch.arange(layer.shown_length, layer.shown_length + tokens, device="cpu")


def _numbers(attention: nn.Module) -> list[float]:
    """What it holds, and its configuration."""
    held = vars(attention)
    tables = [held, *(vars(one) for one in held.values() if isinstance(one, PretrainedConfig))]
    tables += [one for table in tables for one in table.values() if type(one) is dict]
    values = (value for table in tables for value in table.values() if type(value) in (int, float))
    return sorted({float(value) for value in values if value > 0})


def slopes_given(layer: LayerRecord, heads: int, scale: float) -> Iterator[torch.Tensor | None]:
    """(heads,) slopes of a bias among the layer's arguments, as they stand and times the scale; None where it has none.

    The bias must be slope * key position, (rows * heads or heads, 1, tokens); or slope * (key position - that of the
    last), of which it may have more, as MPT.
    """
    rows, tokens = layer.cached.keys.shape[0], layer.cached.keys.shape[2]
    given = (*layer.call.args, *layer.call.kwargs.values())
    biases = [t for t in given if isinstance(t, torch.Tensor) and t.dim() >= 3 and t.is_floating_point()]
    biases = [t for t in biases if t.shape[-2] == 1 and t.numel() in (heads * t.shape[-1], rows * heads * t.shape[-1])]
    biases = [t for t in biases if t.shape[-1] == tokens or (t.shape[-1] > tokens and not t[..., -1].any())]
    if not biases:
        yield None
        return
    bias = biases[0].reshape(-1, heads, biases[0].shape[-1])[0].float()
    end = 0 if bias[:, -1].any() else 1 - bias.shape[-1]
    at = torch.arange(end, end + bias.shape[-1], device=bias.device)
    for slopes in (closed_form(heads).to(bias.device), -bias[:, -2] if end else bias[:, 1]):
        if agree(slopes[:, None] * at, bias.to(biases[0].dtype)):
            yield slopes
            yield slopes * scale


def closed_form(heads: int) -> torch.Tensor:
    """The slopes of the paper: a geometric sequence, with every other one of the next where heads are no power of 2."""
    power = 1 << (heads.bit_length() - 1)
    steps = torch.arange(1, power + 1, device="cpu") * (-8.0 / power)
    more = torch.arange(1, 2 * (heads - power) + 1, 2, device="cpu") * (-4.0 / power)
    return 2.0 ** torch.cat((steps, more))
