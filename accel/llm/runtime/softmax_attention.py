"""Softmax attention over stored keys and values: full, of a sliding window, grouped; found by comparing with a record.

Projections make queries, keys and values; one kernel norms and rotates them, stores, and attends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.libraries.attention import KNOWN_ARGUMENTS
from accel.llm.kv_cache.shape import Shape
from accel.llm.parts.norm import HeadNorm, NormSpec, head_norm
from accel.llm.parts.part import BoundHeadNorm, BoundLinear, NormedInput, part_product, stacked
from accel.llm.parts.step import Step
from accel.llm.recording.plain_attention import plain_attention
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.llm.runtime.attention import AttentionSpec, UnderstoodAttention
from accel.llm.runtime.rotary import Rotary, SmallStore, rotaries
from accel.llm.runtime.slopes import slopes_given
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings

# How the outputs of the projections hold heads: three projections; one, queries before keys before values; one, in
# groups of some queries, their key, their value (one query a group in GPT-NeoX and Bloom).
SEPARATE, JOINED, GROUPED = "separate", "joined", "grouped"
Parts = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None
]  # queries, keys, values and a gate, by heads


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
    Falcon does. scale, window, softcap, slopes: as `accel_kernels.paged_attention` takes them; sinks: the name of that
    parameter. key_scale: by which keys are multiplied before they are rotated.
    """

    layout: str
    heads: int
    groups: int
    kv_heads: int
    dim: int
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None
    rotary: Rotary | None
    scale: float
    softcap: float | None
    sinks: str | None
    slopes: torch.Tensor | None
    key_scale: float = 1.0

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(one.norm for one in (self.q_norm, self.k_norm) if one is not None)

    @property
    def has_position_bias(self) -> bool:
        return self.slopes is not None

    @property
    def keywords(self) -> tuple[str, ...]:
        if self.rotary is None:
            return ()
        return (self.rotary.name if self.rotary.given else "position_ids",)

    def kernel_key(self) -> str:
        return repr((replace(self, index=0, settings=(), slopes=None), self.slopes is None))

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        stored, calls = layer.cached, layer.inside(layer.attention)
        if stored.values.shape != stored.keys.shape:
            raise NotUnderstood("keys and values of different sizes")
        options, window = _told(layer, record)
        for found in _formulas(layer, calls, options, window, cls.parts):
            ending = cls.ending(layer, calls, found)
            if ending is not None:
                out, *further = ending
                names = tuple(layer.name(call.module) for call in (*found.projections, *further))
                own = layer.name(layer.attention), plain_settings(layer.attention), names, layer.name(out.module)
                return UnderstoodAttention(cls(*own, stored.place, window, **found.fields), found.projections[0], out)
        raise NotUnderstood(_reason(layer, calls))

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
            return next(((call,) for call in calls if layer.name(call.module) == layer.known.attention.out), None)
        return next(((call,) for call in calls if call.alone and agree(got, call.input.held, slack=2.0)), None)

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundSoftmaxAttention":
        return BoundSoftmaxAttention(kernels, layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> Shape:
        return Shape(self.kv_heads, self.dim, dtype, device, kv_dtype)


class BoundSoftmaxAttention:
    """One attention with the tensors it reads."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: SoftmaxSpec, stack: bool):
        def head_norm(one: HeadNorm | None) -> BoundHeadNorm | None:
            return None if one is None else BoundHeadNorm(kernels, layer, one)

        self.spec, self.module = spec, layer.get_submodule(spec.name)
        self.q_norm, self.k_norm = head_norm(spec.q_norm), head_norm(spec.k_norm)
        self.projections = [BoundLinear(layer.get_submodule(name)) for name in spec.projections]
        self.joint = stacked(self.projections, stack)
        self.sizes = (
            None if self.joint is None else [linear.weights.outputs for linear in self.projections if linear.weights]
        )
        self.layout = (spec.layout, spec.heads, spec.groups, spec.kv_heads, spec.dim)
        out = layer.get_submodule(spec.out)
        device = next(chain(out.parameters(), out.buffers())).device
        self.slopes = None if spec.slopes is None else spec.slopes.to(device)
        self.sinks = None if spec.sinks is None else self.module._parameters[spec.sinks]

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        return self.attended(kernels, step, self.parts(self.projected(kernels, h)), kwargs)

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """What the projections give, by heads."""
        return (*split(outputs, *self.layout), None)

    def projected(self, kernels: Kernels, h: NormedInput) -> Sequence[torch.Tensor]:
        """What the projections give, (rows, new, N) each."""
        if self.joint is None:
            return [linear(kernels, h) for linear in self.projections]
        return part_product(kernels, self.joint, h).split(self.sizes, dim=-1)

    def attended(self, kernels: Kernels, step: Step, parts: Parts, kwargs: dict) -> torch.Tensor:
        """Of queries, keys and values, neither normed nor rotated; times sigmoid(gate)."""
        spec = self.spec
        q, k, v, gate = parts
        gating = {} if gate is None else {"gate": gate}
        q, q_norm = _normed(q, self.q_norm)
        k, k_norm = _normed(k, self.k_norm)
        if spec.key_scale != 1.0:
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
            dense=kernels.prompt, **gating,
        )  # fmt: skip


def _normed(t: torch.Tensor, norm: BoundHeadNorm | None) -> tuple:
    """(t, the norm left to the attention), or t already normed and None."""
    if norm is None or norm.fused is not None:
        return t, None if norm is None else norm.fused
    return norm(t), None


def split(
    outputs: Sequence[torch.Tensor], layout: str, heads: int, groups: int, kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the projections, (rows, new, N), as queries, keys and values, (rows, new, heads, D)."""
    if layout == SEPARATE:
        q, k, v = (y.unflatten(-1, (-1, dim)) for y in outputs)
    elif layout == JOINED:
        q, k, v = outputs[0].unflatten(-1, (-1, dim)).split([heads, groups, groups], dim=-2)
    else:
        y = outputs[0].unflatten(-1, (groups, -1, dim))
        q, k, v = y[..., :-2, :].flatten(-3, -2), y[..., -2, :], y[..., -1, :]
    if groups != kv_heads:
        k, v = (t.repeat_interleave(kv_heads // groups, dim=-2) for t in (k, v))
    return q, k, v


def _formulas(
    layer: LayerRecord, calls: list[Call], options: dict, window: int | None, parts: Callable
) -> Iterator[Formula]:
    """Those that fit the recorded queries and keys. parts: see `SoftmaxSpec.parts`."""
    for projections, layout in _projections(calls, layer):
        found_parts = parts(layer, [call.output.held for call in projections], layout)
        if found_parts is None:
            continue
        (q, k, v, gate), more = found_parts
        for k_norm, normed_k in head_norm(layer, calls, k):
            for key_scale, rotary in _rotations(layer, normed_k):
                for q_norm, normed_q in head_norm(layer, calls, q):
                    norms = {"q_norm": q_norm, "k_norm": k_norm, "key_scale": key_scale}
                    found = layout | norms | {"rotary": rotary} | more
                    for scores, got in _results(layer, options, window, rotary, normed_q, normed_k * key_scale, v):
                        yield Formula(projections, found | scores, got, gate)


def _rotations(layer: LayerRecord, k: torch.Tensor) -> Iterator[tuple[float, Rotary | None]]:
    """By what keys are multiplied, and how they are rotated, to be those that are stored."""
    keys = layer.cached.keys
    length = float(keys.double().norm() / k.double().norm().clamp_min(1e-30))  # which no rotation changes
    for number in dict.fromkeys((1.0, named_factor(length, keys.dtype, (layer.attention, layer.layer)) or 1.0)):
        for rotary in rotaries(layer, k * number, keys):
            yield number, rotary


def _reason(layer: LayerRecord, calls: list[Call]) -> str:
    """In which of its steps an attention of no known formula is another."""
    projected = rotated = False
    for projections, layout in _projections(calls, layer):
        projected, (_, k, _) = True, split([call.output.held for call in projections], **layout)
        normed = (one for _, one in head_norm(layer, calls, k))
        rotated = rotated or any(True for one in normed for _ in _rotations(layer, one))
    if not rotated:
        if projected:
            return "its keys are not what projection, norm and rotation give"
        return "no projection gives the values it stores, beside queries and keys in an order that is known"
    attended = layer.attended
    if attended is None:
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


def _told(layer: LayerRecord, record: Record) -> tuple[dict, int | None]:
    """What the attention function was told, and the sliding window of the mask."""
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
    return options, record.window(mask)


def _projections(calls: list[Call], layer: LayerRecord) -> Iterator[tuple[tuple[Call, ...], dict]]:
    """Calls whose outputs may hold queries, keys and values, and the arguments of `split` for them."""
    rows, stored, tokens, d = layer.cached.values.shape
    values = layer.cached.values.transpose(1, 2)  # (rows, tokens, heads, D)

    def flat(call: Call) -> bool:
        return call.alone and call.made is not None and call.output.held.shape[:2] == (rows, tokens)

    def layout(kind: str, heads: int, groups: int) -> dict[str, Any]:
        return {"layout": kind, "heads": heads, "groups": groups, "kv_heads": stored, "dim": d}

    whole = [call for call in calls if flat(call) and call.output.held.dim() == 3]
    for call in whole:
        y = call.output.held
        total, rest = divmod(y.shape[-1], d)
        if rest:
            continue
        if total == stored and torch.equal(y.unflatten(-1, (-1, d)), values):
            siblings = [c for c in whole if c is not call and c.input.same(call.input)]
            for k in (c for c in siblings if c.output.held.shape[-1] == stored * d):
                for q in (c for c in siblings if c is not k and c.output.held.shape[-1] % (stored * d) == 0):
                    yield (q, k, call), layout(SEPARATE, q.output.held.shape[-1] // d, stored)
        if total > 2 * stored and torch.equal(y[..., -stored * d :].unflatten(-1, (-1, d)), values):
            yield (call,), layout(JOINED, total - 2 * stored, stored)
        for groups in (g for g in range(1, total // 3 + 1) if total % g == 0 and stored % g == 0):
            mine = y.unflatten(-1, (groups, -1, d))[..., -1, :]
            if torch.equal(mine.repeat_interleave(stored // groups, dim=-2), values):
                yield (call,), layout(GROUPED, total - 2 * groups, groups)


def _results(
    layer: LayerRecord,
    options: dict,
    window: int | None,
    rotary: Rotary | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Scale and the like, and what attention with these gives; None for that where they are known already."""
    holders = (layer.attention, layer.layer)
    angles = {}
    if rotary is not None:
        cos, sin = (t.to(q.dtype) for t in rotary.angles(layer.call.kwargs, layer.attention))
        angles = {"cos": cos, "sin": sin, "interleaved": rotary.interleaved}
    usual = q.shape[-1] ** -0.5
    if layer.attended is None:
        scales = [usual, 1.0, *(x for holder in holders for x in vars(holder).values() if type(x) is float)]
    else:
        after_rope, wanted = SmallStore(q), layer.attended.query.transpose(1, 2)
        after_rope(q, q, q, 1.0, **angles)
        if after_rope.keys.numel() != wanted.numel():  # a gate comes out of the same projection
            return
        before = named_factor(factor(after_rope.keys, wanted), q.dtype, holders)  # OPT scales queries, not scores
        if before is None or not agree(after_rope.keys * before, wanted):
            return
        told = options.get("scaling")
        scales = [before * (usual if told is None else told)]
    sinks, softcap = options.get("s_aux"), options.get("softcap")
    name = next((name for name, p in layer.attention.named_parameters(recurse=False) if p is sinks), None)
    if sinks is not None and name is None:
        return
    if layer.known is not None:  # scores this large choose one key, which rounding may tip
        yield {name: getattr(layer.known.attention, name) for name in ("scale", "softcap", "sinks", "slopes")}, None
        return
    store = SmallStore(k)
    for scale in dict.fromkeys(scales):
        for slopes in slopes_given(layer, q.shape[2], scale):
            got = store(q, k, v, scale, slopes=slopes, window=window, softcap=softcap, sinks=sinks, **angles)
            yield {"scale": scale, "softcap": softcap, "sinks": name, "slopes": slopes}, got
