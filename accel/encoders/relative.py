"""Scores by content and distance, as of DeBERTa (He et al. 2021): queries and keys meet projected embeddings of how far
apart they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel.comparison import agree, factor
from accel.encoders.position_bias import SeenBias, by_distance
from accel.llm.recording.record import LayerRecord, NotUnderstood
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class Relative:
    """keyword: by which the layer is given the embeddings, (columns or more, C). by_query, by_key: names of the modules
    that project them for products with queries and with keys. buckets, most: see `PositionBias`.
    """

    keyword: str
    by_query: str
    by_key: str
    columns: int
    buckets: tuple[int, ...] = ()
    most: int | None = None

    def learned(self, gathered: Sequence[tuple], biases: Sequence[SeenBias]) -> tuple[tuple[int, ...], int | None]:
        """Which column there is for each distance, by what was seen in a long text: calls of torch.gather, as of
        `seen_relative`, and of embeddings. Raises NotUnderstood.
        """
        longest = max((index.shape[-1] for _, index, _ in gathered), default=0)
        tables = [index[0] for _, index, _ in gathered if index.shape[-1] == longest]
        if not tables or any(not torch.equal(one, (tables[0], tables[0].t())[at % 2]) for at, one in enumerate(tables)):
            raise NotUnderstood("its distances are of another kind in long texts")
        found = by_distance("", tables[0].cpu())
        return found.buckets, found.most

    def bind(self, layer: nn.Module, device: torch.device) -> "BoundRelative":
        return BoundRelative(layer, self, device)


@dataclass(frozen=True)
class SeenRelative:
    """What is added to scores, of which `key` are the keys, (rows, heads, L, D): all times scale."""

    spec: Relative
    key: torch.Tensor
    scale: float


def seen_relative(
    layer: LayerRecord, query: torch.Tensor, scores: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor, Any]]
) -> SeenRelative | None:
    """Of recorded scores, (rows, heads, L, L). seen: calls of torch.gather, what each gave, its index, and the product
    that it was of. None for another formula.
    """
    if len(seen) != 2:
        return None
    (first, place, c2p), (second, turned, p2c) = seen
    rows, heads, length, _ = scores.shape
    shapes = {tuple(one.shape) for one in (first, place, second, turned)}
    if shapes != {(rows * heads, length, length)} or not torch.equal(place, turned.transpose(1, 2)):
        return None
    if c2p.left.shape != p2c.left.shape or not torch.equal(c2p.left.view(query.shape), query):
        return None
    key = p2c.left.view(query.shape)
    whole = query @ key.transpose(-1, -2) + (first + second.transpose(1, 2)).view(scores.shape)
    scale = factor(whole, scores)
    sources = [_source(layer, one.right, heads) for one in (c2p, p2c)]
    if not agree(scale * whole, scores) or None in sources or sources[0][0] != sources[1][0]:
        return None
    (keyword, by_query), (_, by_key) = sources
    return SeenRelative(Relative(keyword, by_query, by_key, c2p.right.shape[-1]), key, scale)


def _source(layer: LayerRecord, right: torch.Tensor, heads: int) -> Any:
    """By which keyword the layer is given what is projected, and the name of the module that projects it."""
    wanted = right[:heads].permute(2, 0, 1).flatten(1)  # (columns, heads * D)
    for call in (one for one in layer.calls if one.alone and one.made is not None):
        if call.output.held.shape[1:] == wanted.shape and torch.equal(call.output.held[0], wanted):
            given = call.input.held[0]
            for name, value in layer.call.named.items():
                if isinstance(value, torch.Tensor) and value.dim() == 2 and torch.equal(value[: len(given)], given):
                    return name, layer.name(call.module)
    return None


class BoundRelative:
    """With the modules that project."""

    def __init__(self, layer: nn.Module, spec: Relative, device: torch.device):
        self.spec, self.projections = spec, [layer.get_submodule(one) for one in (spec.by_query, spec.by_key)]
        self.places = torch.tensor(spec.buckets, dtype=torch.int32, device=device)

    def embeddings(self, step: Any, kwargs: dict) -> torch.Tensor:
        """Made outside of the layers in each call."""
        given = kwargs[self.spec.keyword]
        return step.angles(given, self.spec, lambda: (given[: self.spec.columns],))[0]

    def __call__(self, kernels: Kernels, step: Any, q: torch.Tensor, k: torch.Tensor, kwargs: dict) -> dict[str, Any]:
        """The keywords of `accel_kernels.packed_attention`. q, k: (T, heads, D)."""
        embeddings = self.embeddings(step, kwargs)
        projected = (one(embeddings).unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0) for one in self.projections)
        by_query, by_key = ((t.transpose(0, 1) @ one).transpose(0, 1) for t, one in zip((q, k), projected, strict=True))
        places = self.places.flip(0) if step.packing.mirrored else self.places
        return {"by_query": by_query, "by_key": by_key, "places": places}
