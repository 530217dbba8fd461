"""Softmax attention over stored keys and values: full, of a sliding window, grouped; found by comparing with a record.

Projections make queries, keys and values; one kernel norms and rotates them, stores, and attends.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.libraries.attention import KNOWN_ARGUMENTS, MASK
from accel.llm.attention.attention import AttentionSpec, UnderstoodAttention
from accel.llm.attention.position_terms import POSITIONS, GivenScale, QueryScale, given_scale, query_scale, slopes_given
from accel.llm.attention.projections import projections_of, split
from accel.llm.attention.rotary import Rotary, SmallStore, Turning, turnings
from accel.llm.kv_cache.shape import Shape
from accel.llm.parts.norm import HeadNorm, NormSpec, norm_spec, normlike
from accel.llm.parts.part import BoundHeadNorm, BoundNorm, BoundProjections, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.mask_tables import window_of_table
from accel.llm.recording.plain_attention import plain_attention
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.llm.recording.window import Chunk, window_through
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings

# Queries, keys, values and a gate, by heads.
Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Formula(NamedTuple):
    """Calls of projections, the fields of a spec, and what attention with these gives, (rows, tokens, heads * D).

    got: None where a spec is known from an ordinary record. gate: out of the same projections, or None.
    """

    projections: tuple[Call, ...]
    fields: dict[str, Any]
    got: torch.Tensor | None
    gate: torch.Tensor | None


@dataclass(frozen=True)
class SoftmaxSpec(AttentionSpec):
    """Queries over stored keys and values. projections: of queries, keys and values, or one for all.

    groups: heads of keys in the projections; kv_heads: in the store, a multiple of it where a model repeats them, as
    Falcon does. norms_after, scale, window, softcap, slopes: as `accel_kernels.paged_attention` takes them; sinks: the
    name of that parameter. key_scale: by which keys are multiplied before they are rotated. out_norm: of what the last
    projection is given, as in BitNet. masked: the mask that its layer is given is what it attends by.
    """

    layout: str
    heads: int
    groups: int
    kv_heads: int
    dim: int
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    key_scale: float
    rotary: Rotary | None
    norms_after: bool
    q_scale: QueryScale | GivenScale | None
    scale: float
    softcap: float | None
    sinks: str | None
    slopes: torch.Tensor | None
    out_norm: NormSpec | None = None
    masked: bool = False

    activation, bias = "sigmoid", ""  # of a gate, where there is one, see `GatedSpec`

    @property
    def sees_all(self) -> bool:
        """Whether it sees all keys where its layer is given no mask."""
        return self.masked and ("is_causal", False) in self.settings

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        heads = (one.norm for one in (self.q_norm, self.k_norm) if one is not None)
        return (*heads, *(() if self.out_norm is None else (self.out_norm,)))

    @property
    def has_position_bias(self) -> bool:
        return self.slopes is not None

    @property
    def keywords(self) -> tuple[str, ...]:
        name = None if self.q_scale is None else self.q_scale.keyword
        scaled = () if name is None else (name,)
        if self.rotary is None:
            return scaled
        return (self.rotary.name if self.rotary.given else POSITIONS, *scaled)

    def completed(self, found: AttentionSpec) -> AttentionSpec:
        known, scale = self.q_scale, found.q_scale if isinstance(found, SoftmaxSpec) else None
        if isinstance(known, QueryScale) and isinstance(scale, QueryScale):
            return replace(self, q_scale=replace(known, first=scale.first))
        return replace(self, q_scale=scale) if known is None else self

    def kernel_key(self) -> str:
        return repr((replace(self, index=0, settings=(), slopes=None), self.slopes is None))

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        stored, calls = layer.cached, layer.inside(layer.attention)
        if stored.values.shape != stored.keys.shape:
            raise NotUnderstood("keys and values of different sizes")
        options, window, now = told(layer, record)
        fit = cls.first_fit(layer, calls, formulas_of(layer, calls, options, now, cls.parts), window)
        if fit is None:
            raise NotUnderstood(_reason(layer, calls))
        return fit

    @classmethod
    def first_fit(
        cls, layer: LayerRecord, calls: list[Call], formulas: Iterable[Formula], window: int | None
    ) -> UnderstoodAttention | None:
        """The first of these formulas whose result is projected as it should be."""
        attention, place = layer.attention, layer.cached.place
        for found in formulas:
            if (ending := cls.ending(layer, calls, found)) is not None:
                out, *further = ending
                names = tuple(layer.name(call.module) for call in (*found.projections, *further))
                mask = None if layer.attended is None else layer.attended.mask
                found.fields["masked"] = mask is not None and mask is layer.call.named.get(MASK)
                own = layer.name(attention), plain_settings(attention), names, layer.name(out.module)
                return UnderstoodAttention(cls(*own, place, window, **found.fields), found.projections[0], out)
        return None

    @classmethod
    def parts(
        cls, layer: LayerRecord, outputs: list[torch.Tensor], layout: dict[str, Any]
    ) -> tuple[Parts, dict[str, Any]] | None:
        """What projections of a layout give, and fields of a spec that differ from the layout; None for no such."""
        return (*split(outputs, **layout), None), {}

    @classmethod
    def ending(cls, layer: LayerRecord, calls: list[Call], found: Formula) -> tuple[Call, ...] | None:
        """The calls of the last projection, and of projections besides those of queries, keys and values."""
        got = found.got
        if got is None:
            known = layer.known.attention
            named = {layer.name(one.module): one for one in reversed(layer.calls)}  # the first call of each
            out, end = named.get(known.out), known.out_norm and named.get(known.out_norm.name)
        else:
            behind = (one for one in layer.leaves if one.parent is not layer.attention)
            given = (one for one in (*calls, *behind) if one.alone and agree(got, one.input.held, slack=2.0))
            out = end = next(given, None)
            if end is not None and normlike(layer, end):
                out = next((one for one in calls if one.alone and end.output.same(one.taken)), None)
        norm = None if end is out else end
        if out is None or (norm is not None and not norm.output.same(out.taken)):
            return None
        found.fields.update({} if norm is None else {"out_norm": norm_spec(layer, norm)})
        return (out,)

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundSoftmaxAttention":
        return BoundSoftmaxAttention(kernels, layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> Shape:
        return Shape(self.kv_heads, self.dim, dtype, device, kv_dtype)


class BoundSoftmaxAttention:
    """One attention with the tensors it reads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: SoftmaxSpec, stack: bool):
        out = layer.get_submodule(spec.out)
        self.device = next(chain(out.parameters(), out.buffers())).device

        def head_norm(one: HeadNorm | None) -> BoundHeadNorm | None:
            norm = None if one is None else BoundHeadNorm(kernels, layer, one, spec.dim, self.device)
            if norm is not None and norm.fused is None and spec.norms_after:
                raise NotUnderstood("a norm behind the rotation that must be called")
            return norm

        self.spec, self.module = spec, layer.get_submodule(spec.name)
        self.q_norm, self.k_norm = head_norm(spec.q_norm), head_norm(spec.k_norm)
        self.out_norm = None if spec.out_norm is None else BoundNorm(kernels, layer, spec.out_norm)
        self.projections = BoundProjections(layer, spec.projections, stack)
        self.layout = (spec.layout, spec.heads, spec.groups, spec.kv_heads, spec.dim)
        self.slopes = None if spec.slopes is None else spec.slopes.to(self.device)
        self.sinks = None if spec.sinks is None else self.module._parameters[spec.sinks]

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        y = self.attended(kernels, step, self.parts(self.projections(kernels, h)), kwargs)
        return y if self.out_norm is None else self.out_norm(y)

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """What the projections give, by heads."""
        return (*split(outputs, *self.layout), None)

    def attended(self, kernels: Kernels, step: Step, parts: Parts, kwargs: dict) -> torch.Tensor:
        """Of queries, keys and values, neither normed nor rotated; times sigmoid(gate)."""
        spec = self.spec
        q, k, v, gate = parts
        more: dict[str, Any] = {} if gate is None else {"gate": gate}
        if k is None:
            more["skipped"] = step.written[spec.index] - q.shape[1]
        else:
            step.written[spec.index] = k.shape[1]
        if spec.activation != "sigmoid":
            more["gate_activation"] = spec.activation
        if isinstance(spec.window, Chunk):
            more["chunked"] = True
        if spec.norms_after:
            more["norms_after"] = True
        if spec.masked and (mask := step.mask(spec, kwargs)) is not None:
            more["mask"] = mask
        if spec.q_scale is not None:
            more["q_scales"] = spec.q_scale.of_step(step, spec.index, kwargs, q)
        q, q_norm = normed(q, self.q_norm)
        k, k_norm = normed(k, self.k_norm)
        if k is not None and spec.key_scale != 1.0:
            k, k_norm = (k if k_norm is None or self.k_norm is None else self.k_norm(k)) * spec.key_scale, None
        cos = sin = None
        rotary = spec.rotary
        if rotary is not None:
            source = rotary.source(kwargs, self.module)
            cos, sin = step.angles(source, rotary, lambda: rotary.angles(kwargs, self.module))
        interleaved = rotary is not None and rotary.interleaved
        return kernels.paged_attention(
            q, k, v, step.kvs[spec.index], spec.scale, cos=cos, sin=sin, interleaved=interleaved, q_norm=q_norm,
            k_norm=k_norm, window=spec.window, softcap=spec.softcap, sinks=self.sinks, slopes=self.slopes,
            dense=kernels.prompt, **more,
        )  # fmt: skip


def normed(t: torch.Tensor | None, norm: BoundHeadNorm | None) -> tuple:
    """(t, the norm left to the attention), or t already normed and None."""
    if t is None or norm is None or norm.fused is not None:
        return t, None if norm is None else norm.fused
    return norm(t), None


def formulas_of(
    layer: LayerRecord,
    calls: list[Call],
    options: dict,
    window: int | None,
    parts: Callable,
    sought: Callable = projections_of,
) -> Iterator[Formula]:
    """Those that fit the recorded queries and keys. parts: see `SoftmaxSpec.parts`; sought: see `projections_of`."""
    for projections, layout in sought(calls, layer):
        found_parts = parts(layer, [call.output.held for call in projections], layout)
        if found_parts is None:
            continue
        (q, k, v, gate), more = found_parts
        for turned in turnings(layer, calls, q, k):
            for scores, got in _results(layer, options, window, turned, v):
                yield Formula(projections, layout | turned.fields | more | scores, got, gate)


def _reason(layer: LayerRecord, calls: list[Call]) -> str:
    """In which of its steps an attention of no known formula is another."""
    projected = rotated = False
    for projections, layout in projections_of(calls, layer):
        projected, (_, k, _) = True, split([call.output.held for call in projections], **layout)
        rotated = rotated or any(True for _ in turnings(layer, calls, k, k))
    if not rotated:
        if projected:
            return "its keys are not what projection, norm and rotation give"
        return "no projection gives the values it stores, beside queries and keys in an order that is known"
    if (attended := layer.attended) is None:
        return "its queries, scores or result are of another formula"
    options = {name: attended.options.get(name) for name in ("scaling", "softcap", "s_aux")}
    whole = plain_attention(attended.query, layer.cached.keys, layer.cached.values, None, **options)
    if whole.shape == attended.output.shape and agree(whole, attended.output):
        return "its attention sees the future"
    if any(call.alone and agree(attended.output, call.input.held) for call in calls):
        return "its queries or scores are of another formula"
    if any(call.alone and agree(attended.output, call.input.held) for call in layer.calls):
        return "what its attention gives is projected outside of it"
    return "what its attention gives is changed before it is projected"


def told(layer: LayerRecord, record: Record) -> tuple[dict, int | None, int | None]:
    """What the attention function was told, the sliding window, and the window in the run that was recorded."""
    if layer.attended is not None:
        options, mask = layer.attended.options, layer.attended.mask
        for name, value in options.items():
            if name == "is_causal" and value is False:
                raise NotUnderstood("its attention sees the future")
            harmless = name in KNOWN_ARGUMENTS | {"is_causal"} or name.startswith("output_")
            if not harmless and (isinstance(value, torch.Tensor) or value not in (None, False)):
                raise NotUnderstood(f"its attention is told {name}")
    else:
        options, calls = {}, [call for call in layer.calls if call.module is layer.attention]
        given = [value for call in (*calls, layer.call) for value in (*call.args, *call.kwargs.values())]
        mask = next((value for value in given if record.made(value)), None)
    by_table, now = window_of_table(layer.attention, record.tables.get(id(layer.attention)))
    window = min(filter(None, (window_through(record, mask), by_table)), default=None)
    return options, window, now or window


def _results(
    layer: LayerRecord, options: dict, window: int | None, turned: Turning, v: torch.Tensor
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Scale and the like, and what attention with these gives; None for that where they are known already."""
    holders = (layer.attention, layer.layer)
    q, turning = turned.q, turned.arguments
    q_scale: QueryScale | GivenScale | None = None
    usual = q.shape[-1] ** -0.5
    if layer.attended is None:
        scales = [usual, 1.0, *(x for holder in holders for x in vars(holder).values() if type(x) is float)]
    else:
        made, wanted = turned.queries, layer.attended.query.transpose(1, 2)
        if made.numel() != wanted.numel():  # a gate comes out of the same projection
            return
        before = named_factor(factor(made, wanted), q.dtype, holders)  # OPT scales queries, not scores
        if before is None or not agree(made * before, wanted):
            q_scale, before = given_scale(layer, made, wanted), 1.0
            if q_scale is None and layer.known is not None:
                q_scale = query_scale(layer, made, wanted)
            if q_scale is None:
                return
        told = options.get("scaling")
        scales = [before * (usual if told is None else told)]
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    name = next((name for name, p in layer.attention.named_parameters(recurse=False) if p is sinks), None)
    if sinks is not None and name is None:
        return
    if layer.known is not None:  # scores this large choose one key, which rounding may tip
        same = {name: getattr(layer.known.attention, name) for name in ("scale", "softcap", "sinks", "slopes")}
        yield same | {"q_scale": q_scale}, None
        return
    store, scaled = SmallStore(turned.k), {}
    if isinstance(q_scale, GivenScale):
        scaled["q_scales"] = layer.call.named[q_scale.keyword][:, 0, :, 0].expand(q.shape[:2])
    for scale in dict.fromkeys(scales):
        for slopes in slopes_given(layer, q.shape[2], scale):
            scores = {"softcap": softcap, "slopes": slopes, "window": window, "chunked": isinstance(window, Chunk)}
            got = store(q, turned.k, v, scale, **scores, sinks=sinks, **turning, **scaled)
            yield {"q_scale": q_scale, "scale": scale, "softcap": softcap, "sinks": name, "slopes": slopes}, got
