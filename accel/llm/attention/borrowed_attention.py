"""Softmax attention with normed values, over what an earlier layer stored (Gemma 4), or narrow values (MiMo-V2)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.llm.attention.attention import UnderstoodAttention
from accel.llm.attention.projections import SEPARATE
from accel.llm.attention.rotary import SmallStore, rotaries
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention, Formula, Parts, SoftmaxSpec, formulas_of, told
from accel.llm.kv_cache.shape import Shape
from accel.llm.parts.norm import HEADS, TURNED, HeadNorm, NormSpec, given_back, head_norm, norm_spec
from accel.llm.parts.part import BoundHeadNorm
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings


@dataclass(frozen=True)
class NormedValuesSpec(SoftmaxSpec):
    """What is stored as values has gone through v_norm."""

    v_norm: HeadNorm = field(kw_only=True)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return (*super().norms, self.v_norm.norm)

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        stored, calls = layer.stored, layer.inside(layer.attention)
        if stored is None or stored.values.shape != stored.keys.shape:
            return None
        options, window, now = told(layer, record)
        for v_norm, before in value_norms(layer, calls, stored.values.transpose(1, 2)):
            plain = replace(layer, stored=stored._replace(values=before.transpose(1, 2)))
            formulas = formulas_of(plain, calls, options, now, partial(_normed_parts, stored.values, v_norm))
            if (fit := cls.first_fit(layer, calls, formulas, window)) is not None:
                return fit
        return None

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundNormedValues":
        return BoundNormedValues(kernels, layer, self, stack)


def value_norms(layer: LayerRecord, calls: list[Call], values: torch.Tensor) -> Iterator[tuple[HeadNorm, torch.Tensor]]:
    """The norms that gave these values, (rows, tokens, heads, D), and what they were given, likewise."""
    for call in (call for call in calls if call.alone and call.made is not None):
        if call.input.held.shape != call.output.held.shape or call.output.held.dim() != 4:
            continue
        for layout in (HEADS, TURNED):
            before, after = (given_back(one.held, layout, values.shape[-1]) for one in (call.input, call.output))
            if torch.equal(after, values):
                yield HeadNorm(norm_spec(layer, call), layout), before


def _normed_parts(
    values: torch.Tensor, v_norm: HeadNorm, layer: LayerRecord, outputs: list[torch.Tensor], layout: dict[str, Any]
) -> tuple[Parts, dict[str, Any]] | None:
    """As `SoftmaxSpec.parts`, with values as they are stored."""
    found = SoftmaxSpec.parts(layer, outputs, layout)
    if found is None:
        return None
    (q, k, _, gate), more = found
    return (q, k, values.transpose(1, 2), gate), more | {"v_norm": v_norm}


class BoundNormedValues(BoundSoftmaxAttention):
    """The same, with a norm of values."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: NormedValuesSpec, stack: bool):
        super().__init__(kernels, layer, spec, stack)
        self.v_norm = BoundHeadNorm(kernels, layer, spec.v_norm, spec.dim, self.device)

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        q, k, v, gate = super().parts(outputs)
        return q, k, None if v is None else self.v_norm(v), gate


@dataclass(frozen=True)
class NarrowValuesSpec(SoftmaxSpec):
    """Values have `values` channels, no more than keys, and are multiplied by value_scale before they are stored. The
    kernels are given zeros behind them.
    """

    values: int = field(kw_only=True)
    value_scale: float = field(kw_only=True)

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        stored, calls = layer.stored, layer.inside(layer.attention)
        if stored is None or stored.values.shape[:3] != stored.keys.shape[:3]:
            return None
        options, window, now = told(layer, record)
        return cls.first_fit(layer, calls, formulas_of(layer, calls, options, now, _narrow_parts, _narrow), window)

    @classmethod
    def ending(cls, layer: LayerRecord, calls: list[Call], found: Formula) -> tuple[Call, ...] | None:
        """See `SoftmaxSpec`."""
        got = None if found.got is None else _cut(found.got, found.fields["dim"], found.fields["values"])
        return super().ending(layer, calls, found._replace(got=got))

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundNarrowValues":
        return BoundNarrowValues(kernels, layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> Shape:
        return super().cache_layout(dtype, device, kv_dtype)._replace(values=self.values)


def _narrow(calls: list[Call], layer: LayerRecord) -> Iterator[tuple[tuple[Call, ...], dict]]:
    """See `projections_of`."""
    stored = layer.cached
    values, (_, heads, _, dim) = stored.values.transpose(1, 2).flatten(2), stored.keys.shape
    whole = [call for call in calls if call.alone and call.made is not None and call.output.held.dim() == 3]
    for v in (call for call in whole if call.output.held.shape == values.shape):
        scale = named_factor(factor(v.output.held, values), values.dtype, (layer.attention,))
        if scale is None or not torch.equal(v.output.held * scale, values):
            continue
        beside = [call for call in whole if call is not v and call.input.same(v.input)]
        for k in (call for call in beside if call.output.held.shape[-1] == heads * dim):
            for q in (call for call in beside if call is not k and call.output.held.shape[-1] % (heads * dim) == 0):
                layout = {"layout": SEPARATE, "heads": q.output.held.shape[-1] // dim, "groups": heads}
                more = {"values": stored.values.shape[3], "value_scale": scale}
                yield (q, k, v), layout | {"kv_heads": heads, "dim": dim} | more


def _narrow_parts(
    layer: LayerRecord, outputs: list[torch.Tensor], layout: dict[str, Any]
) -> tuple[Parts, dict[str, Any]] | None:
    """See `SoftmaxSpec.parts`."""
    narrow = layout["values"] <= layout["dim"]
    return (_widened(outputs, layout["dim"], layout["values"], layout["value_scale"]), {}) if narrow else None


def _widened(outputs: Sequence[torch.Tensor], dim: int, values: int, scale: float) -> Parts:
    q, k, v = (y.unflatten(-1, (-1, size)) for y, size in zip(outputs, (dim, dim, values), strict=True))
    return q, k, F.pad(v if scale == 1.0 else v * scale, (0, dim - values)), None


def _cut(y: torch.Tensor, dim: int, values: int) -> torch.Tensor:
    """Of what attention gives, (rows, tokens, heads * dim), the channels that values have."""
    return y.unflatten(-1, (-1, dim))[..., :values].flatten(-2)


class BoundNarrowValues(BoundSoftmaxAttention):
    """The same, with values of fewer channels."""

    spec: NarrowValuesSpec

    def attended(self, kernels: Kernels, step: Step, parts: Parts, kwargs: dict) -> torch.Tensor:
        """See `BoundSoftmaxAttention`."""
        return _cut(super().attended(kernels, step, parts, kwargs), self.spec.dim, self.spec.values)

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        return _widened(outputs, self.spec.dim, self.spec.values, self.spec.value_scale)


@dataclass(frozen=True)
class BorrowedSpec(SoftmaxSpec):
    """Queries over what the layer at place `index` has stored, this call's tokens too. One projection, of queries."""

    @property
    def borrows(self) -> bool:
        return True

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        lent, attended, known = layer.borrowed, layer.attended, layer.known
        if lent is None or attended is None:
            return None
        options, window, now = told(layer, record)
        calls = layer.inside(layer.attention)
        _, kv_heads, _, dim = lent.keys.shape
        if lent.values.shape != lent.keys.shape or options.get("s_aux") is not None:
            raise NotUnderstood("it reads another layer's keys and values in a way of its own")
        softcap, scale = options.get("softcap"), options.get("scaling")
        scale = dim**-0.5 if scale is None else scale
        q, k, v = (one.transpose(1, 2) for one in (attended.query, lent.keys, lent.values))
        got = None if known is not None else SmallStore(k)(q, k, v, scale, window=now, softcap=softcap)
        for call in (call for call in calls if call.alone and call.made is not None and call.output.held.dim() == 3):
            y = call.output.held
            if y.shape[-1] != attended.query.shape[1] * dim:
                continue
            for q_norm, normed in head_norm(layer, calls, y.unflatten(-1, (-1, dim))):
                for rotary in rotaries(layer, normed, attended.query):
                    out = _last(layer, calls, got)
                    if out is not None:
                        own = layer.name(layer.attention), plain_settings(layer.attention), (layer.name(call.module),)
                        heads = attended.query.shape[1], kv_heads, kv_heads, dim
                        spec = cls(
                            *own, layer.name(out.module), lent.place, window, SEPARATE, *heads, q_norm, None, 1.0,
                            rotary, False, None, scale, softcap, None, None,
                        )  # fmt: skip
                        return UnderstoodAttention(spec, call, out)
        raise NotUnderstood("its queries, scores or result are of another formula")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundBorrowedAttention":
        return BoundBorrowedAttention(kernels, layer, self, stack)


class BoundBorrowedAttention(BoundSoftmaxAttention):
    """The same, of queries alone."""

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        return outputs[0].unflatten(-1, (-1, self.spec.dim)), None, None, None


def _last(layer: LayerRecord, calls: list[Call], got: torch.Tensor | None) -> Call | None:
    """The call of the last projection, whose input is what attention gives; the known one in an amplified record."""
    if got is None:
        return next((call for call in calls if layer.name(call.module) == layer.known.attention.out), None)
    return next((call for call in calls if call.alone and agree(got, call.input.held, slack=2.0)), None)
