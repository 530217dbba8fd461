"""How one attention makes queries, keys and values, rotates them and attends, found by comparing with a record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel.comparison import agree, factor, named_factor
from accel.libraries.attention import KNOWN_ARGUMENTS
from accel.llm.analysis.attention_kind import AttentionSpec, Understood
from accel.llm.analysis.norm import HeadNorm, NormSpec, head_norm
from accel.llm.analysis.rotary import Rotary, SmallStore, rotaries
from accel.llm.kv_cache.shape import Shape
from accel.llm.recording.plain_attention import plain_attention
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.guard import plain_settings


def slopes_given(layer: LayerRecord, heads: int, scale: float) -> Iterator[torch.Tensor | None]:
    """(heads,) slopes of a bias among the layer's arguments, as they stand and times the scale; None where it has none.

    The bias must be slope * key position, (rows * heads or heads, 1, tokens).
    """
    rows, tokens = layer.cached.keys.shape[0], layer.cached.keys.shape[2]
    given = (*layer.call.args, *layer.call.kwargs.values())
    biases = [t for t in given if isinstance(t, torch.Tensor) and t.numel() in (heads * tokens, rows * heads * tokens)]
    biases = [t for t in biases if t.dim() >= 3 and t.is_floating_point() and t.shape[-2:] == (1, tokens)]
    if not biases:
        yield None
        return
    bias = biases[0].reshape(-1, heads, tokens)[0].float()
    for slopes in (closed_form(heads).to(bias.device), bias[:, 1]):
        if agree(slopes[:, None] * torch.arange(tokens, device=bias.device), bias.to(biases[0].dtype)):
            yield slopes
            yield slopes * scale


def closed_form(heads: int) -> torch.Tensor:
    """The slopes of the paper: a geometric sequence, with every other one of the next where heads are no power of 2."""
    power = 1 << (heads.bit_length() - 1)
    steps = torch.arange(1, power + 1) * (-8.0 / power)
    more = torch.arange(1, 2 * (heads - power) + 1, 2) * (-4.0 / power)
    return 2.0 ** torch.cat((steps, more))


# How the outputs of the projections hold heads: three projections; one, queries before keys before values; one, in
# groups of some queries, their key, their value (one query a group in GPT-NeoX and Bloom).
SEPARATE, JOINED, GROUPED = "separate", "joined", "grouped"


@dataclass(frozen=True)
class SoftmaxSpec(AttentionSpec):
    """Queries over stored keys and values. projections: of queries, keys and values, or one for all.

    groups: heads of keys in the projections; kv_heads: in the store, a multiple of it where a model repeats them, as
    Falcon does. scale, window, softcap, slopes: as `accel_kernels.paged_attention` takes them; sinks: the name of that
    parameter.
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
    window: int | None
    softcap: float | None
    sinks: str | None
    slopes: torch.Tensor | None

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(one.norm for one in (self.q_norm, self.k_norm) if one is not None)

    @property
    def sees(self) -> int | None:
        return self.window

    @property
    def counts_distance(self) -> bool:
        return self.slopes is not None

    @property
    def reads(self) -> tuple[str, ...]:
        if self.rotary is None:
            return ()
        return (self.rotary.name if self.rotary.given else "position_ids",)

    def kernel_key(self) -> str:
        return repr((replace(self, index=0, settings=(), slopes=None), self.slopes is None))


def cache_layout(spec: SoftmaxSpec, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> Shape:
    """A key and a value for each head."""
    return Shape(spec.kv_heads, spec.dim, dtype, device, kv_dtype)


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


def understand(layer: LayerRecord, record: Record) -> Understood:
    """See `AttentionKind`. Raises NotUnderstood."""
    stored = layer.cached
    if stored.values.shape != stored.keys.shape:
        raise NotUnderstood("keys and values of different sizes")
    options, seen = _told(layer, record)
    calls = layer.inside(layer.attention)
    projected = rotated = False
    for projections, layout in _projections(calls, layer):
        q, k, v = split([call.output.held for call in projections], **layout)
        projected = True
        for k_norm, normed_k in head_norm(layer, calls, k):
            for rotary in rotaries(layer, normed_k, stored.keys):
                rotated = True
                for q_norm, normed_q in head_norm(layer, calls, q):
                    found = _result(layer, options, seen, calls, rotary, normed_q, normed_k, v)
                    if found is not None:
                        rest, out = found
                        names = tuple(layer.name(call.module) for call in projections)
                        spec = SoftmaxSpec(
                            layer.name(layer.attention), plain_settings(layer.attention), names, layer.name(out.module),
                            **layout, index=stored.place, q_norm=q_norm, k_norm=k_norm, rotary=rotary, window=seen,
                            **rest,
                        )  # fmt: skip
                        return Understood(spec, projections[0], out)
    if rotated:
        raise NotUnderstood(_unlike(layer, calls))
    if projected:
        raise NotUnderstood("its keys are not what projection, norm and rotation give")
    raise NotUnderstood("no projection gives the values it stores, beside queries and keys in an order that is known")


def _unlike(layer: LayerRecord, calls: list[Call]) -> str:
    """In which of its steps an attention may be of another formula, whose keys and values are understood."""
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


def _result(
    layer: LayerRecord,
    options: dict,
    seen: int | None,
    calls: list[Call],
    rotary: Rotary | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[dict, Call] | None:
    """Scale and the like, and the call of the last projection: that which was given what attention over these gives."""
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
            return None
        before = named_factor(factor(after_rope.keys, wanted), q.dtype, holders)  # OPT scales queries, not scores
        if before is None or not agree(after_rope.keys * before, wanted):
            return None
        told = options.get("scaling")
        scales = [before * (usual if told is None else told)]
    sinks = options.get("s_aux")
    name = next((name for name, p in layer.attention.named_parameters(recurse=False) if p is sinks), None)
    if sinks is not None and name is None:
        return None
    if layer.known is not None:  # scores this large choose one key, which rounding may tip
        known = layer.known.attention
        rest = {name: getattr(known, name) for name in ("scale", "softcap", "sinks", "slopes")}
        return next(((rest, call) for call in calls if layer.name(call.module) == known.out), None)
    store = SmallStore(k)
    more = {"window": seen, "softcap": options.get("softcap"), "sinks": sinks, **angles}
    for scale in dict.fromkeys(scales):
        for slopes in slopes_given(layer, q.shape[2], scale):
            got = store(q, k, v, scale, slopes=slopes, **more)
            for call in calls:
                if call.alone and agree(got, call.input.held, slack=2.0):
                    rest = {"scale": scale, "softcap": more["softcap"], "sinks": name, "slopes": slopes}
                    return rest, call
    return None
