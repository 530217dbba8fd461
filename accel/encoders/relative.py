"""Scores by what queries, and keys too, make of how far apart tokens are: relative keys (Shaw et al. 2018), as of
Transformer-XL (Dai et al. 2019) in Conformers, and by content and distance, as of DeBERTa (He et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn

from accel.comparison import agree, factor
from accel.encoders.packing import SIXTEEN
from accel.encoders.position_bias import SeenBias, by_distance
from accel.llm.recording.record import Attended, LayerRecord, NotUnderstood
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class Relative:
    """by_query: the module that makes columns for products with queries: an embedding of whose rows there is one for
    each distance, or a projection of what the layer is given by `keyword`. by_key: of those with keys, which is given
    that too; "" for none: then it is (1, 2 L - 1, C), from the first key seen from the last query on. columns: else the
    first that was read in the record, and the one behind the last. content, position: parameters that are added to
    queries before they meet keys, and before they meet distances; "" for none. Names are from the layer. buckets, most:
    see `PositionBias`.
    """

    by_query: str
    by_key: str = ""
    keyword: str = ""
    columns: tuple[int, int] | None = None
    content: str = ""
    position: str = ""
    buckets: tuple[int, ...] = ()
    most: int | None = None

    @property
    def in_order(self) -> bool:
        """Whether there is a column for each distance, made for the length of the text."""
        return bool(self.keyword) and not self.by_key

    def learned(self, gathered: Sequence[tuple], biases: Sequence[SeenBias]) -> "Relative":
        """With the column for each distance, by what was seen in a long text: calls of torch.gather, as of
        `seen_relative`, and of embeddings. Raises NotUnderstood.

        Where the columns that are read hang on the length, they are as many before as behind the same middle.
        """
        if self.in_order:
            return self
        middle = sum(self.columns or ()) // 2
        tables = [index[0] + (middle - product.form[-1] // 2) for _, index, product in gathered]
        if not self.by_key:
            tables = [one.ids for one in biases if one.path.endswith(self.by_query)]
        longest = max(map(len, tables), default=0)
        tables = [one for one in tables if len(one) == longest]
        both = (tables[0], tables[0].t() if self.by_key else tables[0]) if tables else ()
        if not both or any(not torch.equal(one, both[at % 2]) for at, one in enumerate(tables)):
            raise NotUnderstood("its distances are of another kind in long texts")
        found = by_distance("", tables[0].cpu())
        return replace(self, buckets=found.buckets, most=found.most, columns=None)

    def bind(self, layer: nn.Module, device: torch.device) -> "BoundRelative":
        return BoundRelative(layer, self, device)


def seen_relative(
    layer: LayerRecord, query: torch.Tensor, scores: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor, Any]]
) -> tuple[Relative, torch.Tensor, float, tuple[float, float]] | None:
    """What is added to recorded scores, (rows, heads, L, L), and keys, (rows, heads, L, D). Then by what all is
    multiplied, and by what the products of `Relative` with queries and keys are. None for another formula.

    seen: calls of torch.gather, what each gave, its index, and the product that it was of.
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
    if not agree(scale * whole, scores) or None in sources or sources[0][:2] != sources[1][:2]:
        return None
    (*read, by_query, times), (*_, by_key, others) = sources
    columns = read[1], read[1] + c2p.right.shape[-1]
    return Relative(by_query, by_key, read[0], columns), key, scale, (times, others)


def _source(layer: LayerRecord, right: torch.Tensor, heads: int) -> Any:
    """By which keyword the layer is given what is projected, from which row on, the name of the module that projects
    it, and by what that is multiplied.
    """
    wanted = right.flatten(0, -3)[:heads].permute(2, 0, 1).flatten(1)  # (columns, heads * D)
    for call in (one for one in layer.calls if one.alone and one.made is not None):
        made, given = call.output.held[0], call.input.held[0]
        times = factor(made, wanted) if made.shape == wanted.shape else 0.0
        if not times or not agree(made * times, wanted):
            continue
        for name, value in layer.call.named.items():
            if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1:] == given.shape[1:]:
                for first in (value == given[0]).all(-1).nonzero().flatten().tolist():
                    if torch.equal(value[first : first + len(given)], given):
                        return name, first, layer.name(call.module), times
    return None


def seen_by_query(layer: LayerRecord, attended: Attended, bias: object, seen: Sequence[SeenBias]) -> Relative | None:
    """Of what is added to recorded scores, (rows, heads, L, L); None where it is something else. Takes from recorded
    queries what was added to them. Raises NotUnderstood.
    """
    q, scale = attended.query, attended.options.get("scaling") or attended.query.shape[-1] ** -0.5
    _, heads, length, dim = q.shape
    if not isinstance(bias, torch.Tensor) or bias.shape != (*q.shape[:3], length):
        return None
    for one in (one for one in seen if one.path.startswith(f"{layer.path}.") and one.values.shape[-1] == dim):
        if one.values.shape[0] == length and agree(scale * torch.einsum("bhld,lrd->bhlr", q, one.values), bias):
            return Relative(one.path.removeprefix(f"{layer.path}."))
    own = [(name, one) for name, one in layer.attention._parameters.items() if one is not None]
    at = torch.arange(length, device=q.device)
    places = (at - at[:, None] + length - 1).expand(*q.shape[:2], -1, -1)
    for call in (one for one in layer.inside(layer.attention) if one.alone and one.made is not None):
        keyword = next((name for name, one in layer.call.named.items() if one is call.input.tensor), "")
        if not keyword or call.output.held.shape[1:] != (2 * length - 1, heads * dim):
            continue
        columns = call.output.held[0].unflatten(-1, (heads, dim)).permute(1, 2, 0)
        for (u, content), (v, position) in permutations([pair for pair in own if pair[1].shape == (heads, dim)], 2):
            plain = q - content[:, None]
            if agree(scale * ((plain + position[:, None]) @ columns).gather(-1, places), bias):
                if torch.equal(content, position):
                    raise NotUnderstood("what it adds to queries for keys and for distances are the same numbers")
                attended.query, before = plain, layer.name(layer.attention)
                return Relative(
                    layer.name(call.module), keyword=keyword, content=f"{before}.{u}", position=f"{before}.{v}"
                )
    return None


class BoundRelative:
    """With the tensors it reads."""

    def __init__(self, layer: nn.Module, spec: Relative, device: torch.device):
        self.spec = spec
        self.by_query, self.by_key = (layer.get_submodule(one) if one else None for one in (spec.by_query, spec.by_key))
        added = (layer.get_parameter(one) if one else None for one in (spec.content, spec.position))
        self.content, self.position = added
        self.places = torch.tensor(spec.buckets, dtype=torch.int32, device=device)

    def tables(self, step: Any, kwargs: dict) -> tuple[torch.Tensor, ...]:
        """What is projected, and which column of that there is for each distance; made once in each call."""
        given, buckets, middle = kwargs[self.spec.keyword], self.spec.buckets, len(self.spec.buckets) // 2

        def make() -> tuple[torch.Tensor, ...]:
            if self.spec.in_order:
                return (given[0],)
            far = min(middle, step.packing.longest - 1)
            near = slice(middle - far, middle + far + 1)
            count = max(buckets[near]) + 1 - min(buckets[near])
            count += -count % SIXTEEN  # else products are slow
            first = max(0, min(*buckets[near], len(given) - count))
            return given[first : first + count], self.places[near] - first

        return step.angles(given, (self.spec.keyword, buckets), make)

    def __call__(self, kernels: Kernels, step: Any, q: torch.Tensor, k: torch.Tensor, kwargs: dict) -> dict[str, Any]:
        """The keywords of `accel_kernels.packed_attention`. q, k: (T, heads, D)."""

        tables = self.tables(step, kwargs) if self.spec.keyword else ()

        def products(t: torch.Tensor, module: Any) -> torch.Tensor:
            if not tables:
                columns = module.weight.to(q.dtype).t()
            else:
                columns = module(tables[0]).unflatten(-1, (q.shape[1], -1)).permute(1, 2, 0)
            return (t.transpose(0, 1) @ columns).transpose(0, 1)

        by_query = products(q if self.position is None else q + self.position, self.by_query)
        if self.by_key is None:
            by_key = by_query.new_zeros(by_query.shape[-1]).expand_as(by_query)
        else:
            by_key = products(k, self.by_key)
        if self.spec.in_order:
            places = torch.arange(by_query.shape[-1], dtype=torch.int32, device=q.device)
        else:
            places = tables[1] if tables else self.places
        places = places.flip(0) if step.packing.mirrored else places
        q = q if self.content is None else q + self.content
        return {"q": q, "by_query": by_query, "by_key": by_key, "places": places}
