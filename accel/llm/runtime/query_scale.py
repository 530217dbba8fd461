"""A factor by which queries grow with their position, as Llama 4 and Ministral 3 have it for long texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
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

    def of_step(self, step: Step, place: int, kwargs: dict, q: torch.Tensor) -> torch.Tensor:
        """(rows, new) float32, made once for all layers. q: (rows, new, heads, D). kwargs: of the layer."""
        kv, given = step.kvs[place], kwargs.get(POSITIONS)
        counted = self.counted and kv.ragged is None
        rows, new = q.shape[:2]

        def make() -> tuple[torch.Tensor]:
            positions = kv.metadata[LENGTH] + torch.arange(new, device=q.device) if counted else given
            return (self.at(positions).expand(rows, new).contiguous(),)

        return step.angles(kv.metadata if counted else given, (self, rows), make)[0]


def query_scale(layer: LayerRecord, turned: torch.Tensor, wanted: torch.Tensor) -> QueryScale | None:
    """The one that makes the queries that attention was given, both (rows, tokens, heads, D); None where none does.

    Its numbers are among those that the attention or its configuration holds.
    """
    grown = (
        torch.tensor([factor(*one) for one in zip(turned.unbind(1), wanted.unbind(1), strict=True)], device="cpu") - 1.0
    )
    numbers = _numbers(layer.attention)
    for counted, positions in _positions(layer):
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
    given = layer.call.kwargs.get(POSITIONS)
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
