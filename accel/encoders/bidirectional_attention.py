"""Attention in both directions among the tokens of a call, found by comparing with a record; nothing is stored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.libraries.attention import KNOWN_ARGUMENTS
from accel.llm.attention.attention import UnderstoodAttention
from accel.llm.attention.projections import projections_of, split
from accel.llm.attention.rotary import turnings
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention, Formula, Parts, SoftmaxSpec, normed
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels

QUERIES = (3, 77, 5003, 200_003)  # positions of queries whose view is looked at
MOST = 1 << 17  # how far


@dataclass(frozen=True)
class BidirectionalSpec(SoftmaxSpec):
    """reach: how far a token sees to the left and to the right; None for all."""

    reach: tuple[int, int] | None = None

    @property
    def has_position_bias(self) -> bool:
        return self.reach is not None

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention:
        attended, calls = layer.attended, layer.inside(layer.attention)
        if attended is None:
            raise NotUnderstood("it does not attend by transformers' interface")
        for name, value in attended.options.items():
            if name not in KNOWN_ARGUMENTS and (isinstance(value, torch.Tensor) or value not in (None, False)):
                raise NotUnderstood(f"its attention is told {name}")
        if attended.options.get("softcap") or attended.options.get("s_aux") is not None:
            raise NotUnderstood("its scores are capped, or go to sinks")
        functions = [function for mask, function in record.masks if mask is attended.mask]
        if len(functions) != 1:
            raise NotUnderstood("its attention mask is made in a way of its own")
        fit = cls.first_fit(layer, calls, _formulas(layer, calls, reach_of(functions[0])), None)
        if fit is None:
            raise NotUnderstood("its attention is of another formula")
        return fit

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundBidirectionalAttention":
        return BoundBidirectionalAttention(kernels, layer, self, stack)


def _formulas(layer: LayerRecord, calls: list[Call], reach: tuple[int, int] | None) -> Iterator[Formula]:
    attended = layer.attended
    assert attended is not None
    wanted, told = attended.query.transpose(1, 2), attended.options.get("scaling")
    for projections, layout in projections_of(calls, layer):
        q, k, _ = split([call.output.held for call in projections], **layout)
        for turned in turnings(layer, calls, q, k):
            holders = (layer.attention, layer.layer)
            made = turned.queries
            before = named_factor(factor(made, wanted), q.dtype, holders) if made.shape == wanted.shape else None
            if turned.fields["norms_after"] or before is None or not agree(made * before, wanted):
                continue
            scale = before * (q.shape[-1] ** -0.5 if told is None else told)
            scores = {"q_scale": None, "scale": scale, "softcap": None, "sinks": None, "slopes": None, "reach": reach}
            yield Formula(projections, layout | turned.fields | scores, attended.output.flatten(2), None)


def reach_of(visible: Callable[..., Any]) -> tuple[int, int] | None:
    """How far a query sees to the left and to the right by a function (row, head, query, key) -> bool; None for all.
    Raises NotUnderstood for any other view.
    """
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    found = set()
    for query in QUERIES:
        keys = torch.arange(max(0, query - MOST), query + MOST, device="cpu")
        try:
            seen = torch.as_tensor(visible(zero, zero, torch.full_like(keys, query), keys)).expand(len(keys)).nonzero()
        except (IndexError, RuntimeError) as error:  # it looks positions up, or is of another device
            raise NotUnderstood("its attention mask is made of more than positions") from error
        first, last = (int(keys[seen[at]]) if len(seen) else -1 for at in (0, -1))
        if last - first + 1 != len(seen) or not first <= query <= last:
            raise NotUnderstood("its attention mask is no window")
        # Where the view ends with the keys that are looked at, it may go on.
        found.add((None if first == keys[0] else query - first, None if last == keys[-1] else last - query))
    lefts, rights = {left for left, _ in found} - {None}, {right for _, right in found}
    if rights == {None} and not lefts:
        return None
    if len(lefts) != 1 or len(rights) != 1 or None in rights:
        raise NotUnderstood(
            "it attends to what is before a token alone" if rights == {0} else "no window that is known"
        )
    left, right = lefts.pop(), rights.pop()
    assert left is not None and right is not None
    return left, right


class BoundBidirectionalAttention(BoundSoftmaxAttention):
    """One attention with the tensors it reads, over the packed tokens of a step."""

    spec: BidirectionalSpec

    def attended(self, kernels: Kernels, step: Any, parts: Parts, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`; one row with all tokens."""
        spec, packing = self.spec, step.packing
        q, k, v, _ = parts
        assert k is not None and v is not None
        rotary, inside = spec.rotary, spec.rotary is not None and spec.key_scale == 1.0
        (q, q_norm), (k, k_norm) = (
            normed(t, norm) if inside or norm is None else (norm(t), None)
            for t, norm in ((q[0], self.q_norm), (k[0], self.k_norm))
        )
        k = k if spec.key_scale == 1.0 else k * spec.key_scale
        if rotary is not None:
            cos, sin = (one[0] for one in self.angles(step, kwargs))
            given = {"interleaved": rotary.interleaved, "q_norm": q_norm, "k_norm": k_norm}
            q, k = kernels.rotated_heads(q, k, cos, sin, **given)
        return kernels.packed_attention(
            q, k, v[0], packing.starts, spec.scale, longest=packing.longest, window=spec.reach, keys=packing.keys
        )[None]

    def angles(self, step: Any, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotations of the packed tokens, made once for all layers that share them."""
        assert self.spec.rotary is not None
        source = self.spec.rotary.source(kwargs, self.module)
        return step.angles(source, self.spec.rotary, partial(self._angles, step, kwargs))

    def _angles(self, step: Any, kwargs: dict) -> tuple[torch.Tensor, ...]:
        """cos, sin of the packed tokens, (1, T, R / 2)."""
        assert self.spec.rotary is not None
        tables = self.spec.rotary.angles(kwargs, self.module)
        return tuple(step.packing.pack(one.expand(*step.shape, -1))[None] for one in tables)
