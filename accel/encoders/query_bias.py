"""Scores by what queries make of distances: relative keys (Shaw et al. 2018), and those of Transformer-XL (Dai et al.
2019), as in Conformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import nn

from accel.comparison import agree
from accel.encoders.position_bias import SeenBias, by_distance
from accel.llm.recording.record import Attended, LayerRecord, NotUnderstood
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class QueryBias:
    """embedding: of whose rows there is one for each distance; else projection: the module, of what the layer is given
    by this keyword, (1, 2 L - 1, C), from the first key seen from the last query on. content, position: parameters that
    are added to queries before they meet keys, and before they meet distances; "" for none. Names are from the layer.
    buckets, most: see `PositionBias`.
    """

    embedding: str = ""
    projection: str = ""
    keyword: str = ""
    content: str = ""
    position: str = ""
    buckets: tuple[int, ...] = ()
    most: int | None = None

    def learned(self, gathered: Sequence[tuple], biases: Sequence[SeenBias]) -> tuple[tuple[int, ...], int | None]:
        """See `Relative.learned`."""
        if not self.embedding:
            return (), None
        longest = max((len(one.ids) for one in biases), default=0)
        tables = [one.ids for one in biases if one.path.endswith(self.embedding) and len(one.ids) == longest]
        if not tables or any(not torch.equal(one, tables[0]) for one in tables):
            raise NotUnderstood("its distances are of another kind in long texts")
        found = by_distance("", tables[0].cpu())
        return found.buckets, found.most

    def bind(self, layer: nn.Module, device: torch.device) -> "BoundQueryBias":
        return BoundQueryBias(layer, self, device)


def seen_query_bias(layer: LayerRecord, attended: Attended, bias: object, seen: Sequence[SeenBias]) -> QueryBias | None:
    """Of what is added to recorded scores, (rows, heads, L, L); None where it is something else. Takes from recorded
    queries what was added to them. Raises NotUnderstood.
    """
    q, scale = attended.query, attended.options.get("scaling") or attended.query.shape[-1] ** -0.5
    _, heads, length, dim = q.shape
    if not isinstance(bias, torch.Tensor) or bias.shape != (*q.shape[:3], length):
        return None
    for one in (one for one in seen if one.path.startswith(f"{layer.path}.") and one.values.shape[-1] == dim):
        if one.values.shape[0] == length and agree(scale * torch.einsum("bhld,lrd->bhlr", q, one.values), bias):
            return QueryBias(embedding=one.path.removeprefix(f"{layer.path}."))
    own = [(name, one) for name, one in layer.attention._parameters.items() if one is not None]
    at = torch.arange(length, device=q.device)
    places = (at - at[:, None] + length - 1).expand(*q.shape[:2], -1, -1)
    for call in (one for one in layer.inside(layer.attention) if one.alone and one.made is not None):
        keyword = next((name for name, one in layer.call.named.items() if one is call.input.tensor), "")
        if not keyword or call.output.held.shape != (1, 2 * length - 1, heads * dim):
            continue
        columns = call.output.held[0].unflatten(-1, (heads, dim)).permute(1, 2, 0)
        for (u, content), (v, position) in permutations([pair for pair in own if pair[1].shape == (heads, dim)], 2):
            plain = q - content[:, None]
            if agree(scale * ((plain + position[:, None]) @ columns).gather(-1, places), bias):
                if torch.equal(content, position):
                    raise NotUnderstood("what it adds to queries for keys and for distances are the same numbers")
                attended.query, before = plain, layer.name(layer.attention)
                return QueryBias("", layer.name(call.module), keyword, f"{before}.{u}", f"{before}.{v}")
    return None


class BoundQueryBias:
    """With the tensors it reads."""

    def __init__(self, layer: nn.Module, spec: QueryBias, device: torch.device):
        self.spec = spec
        self.projection = layer.get_submodule(spec.embedding or spec.projection)
        added = (layer.get_parameter(one) if one else 0.0 for one in (spec.content, spec.position))
        self.content, self.position = added
        self.places = torch.tensor(spec.buckets, dtype=torch.int32, device=device)

    def embeddings(self, step: Any, kwargs: dict) -> torch.Tensor:
        """Made outside of the layers in each call."""
        given = kwargs[self.spec.keyword]
        return step.angles(given, self.spec.keyword, lambda: (given[0],))[0]

    def __call__(self, kernels: Kernels, step: Any, q: torch.Tensor, k: torch.Tensor, kwargs: dict) -> dict[str, Any]:
        """The keywords of `accel_kernels.packed_attention`. q, k: (T, heads, D)."""
        places = self.places
        if self.spec.embedding:
            weight: Any = self.projection.weight
            columns = weight.to(q.dtype).t()
        else:
            columns = self.projection(self.embeddings(step, kwargs)).unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0)
            places = torch.arange(columns.shape[-1], dtype=torch.int32, device=q.device)
        by_query = ((q + self.position).transpose(0, 1) @ columns).transpose(0, 1)
        places = places.flip(0) if step.packing.mirrored else places
        by_key = by_query.new_zeros(columns.shape[-1]).expand_as(by_query)
        return {"q": q + self.content, "by_query": by_query, "by_key": by_key, "places": places}
