"""Attention among the tokens of a call, found by comparing with a record: both ways, in a window, or causal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.encoders.own_code import OwnAttended
from accel.encoders.packing import Packing, blocks_of
from accel.encoders.position_bias import PositionBias, SeenBias
from accel.encoders.relative import Relative, seen_by_query
from accel.encoders.windows import BoundWindowAttention, added_by
from accel.libraries.attention import KNOWN_ARGUMENTS
from accel.llm.attention.attention import UnderstoodAttention
from accel.llm.attention.borrowed_attention import value_norms
from accel.llm.attention.projections import projections_of, split
from accel.llm.attention.rotary import FORMS, FORMS_OF_ENCODERS, Forms, turnings
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention, Formula, Parts, SoftmaxSpec, normed
from accel.llm.parts.norm import HeadNorm, NormSpec
from accel.llm.parts.part import BoundHeadNorm
from accel.llm.recording.reach import Reach, reach_of
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record, Value
from accel.patching.fast_forward import Kernels

SHOWN = {"is_causal", "return_dict"}  # the former by the mask
OWN = "its own code attends, by a formula that is not known"
OWN_MASK = "its attention mask is made in a way of its own"
UNTURNED = {"q_norm": None, "k_norm": None, "key_scale": 1.0, "rotary": None, "norms_after": False}
PLAIN = {"q_scale": None, "softcap": None, "sinks": None, "slopes": None}  # scores of nothing but products


@dataclass
class EncoderRecord(Record):
    """biases: what embeddings gave for each query and key, so far. ends: of the parts of its tokens that the last layer
    attended in, from 0 on. in_windows: its calls are of one window of a picture each, and what is added to scores hangs
    on no token. padded: whether calls may have padding.
    """

    biases: list[SeenBias] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    in_windows: bool = False
    padded: bool = True

    def bias(self, value: object) -> str | None:
        """The path of the embedding whose rows this is made of; None for any other."""
        return next((one.path for one in self.biases if one.is_in(value)), None)


@dataclass(frozen=True)
class BidirectionalSpec(SoftmaxSpec):
    """reach: how far a token sees to the left and to the right, each None for all; None where both are.
    position_bias, relative: of scores. own_code: it is not known by transformers' interface, but by what it gives
    alone. added: names of parameters that are added to queries and values, from the attention. starts: the keyword of
    its layer that tells where sequences begin which lie in one row, see `packed`.
    windows: of a picture, see `Windows`. pairs: its layer's own code makes what is added to scores, of no token.
    v_norm: of values.
    """

    reach: Reach | None = None
    position_bias: PositionBias | None = None
    relative: Relative | None = None
    own_code: bool = False
    added: tuple[str, ...] = ()
    starts: str | None = None
    windows: bool = False
    pairs: bool = False
    v_norm: HeadNorm | None = None

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return (*super().norms, *(() if self.v_norm is None else (self.v_norm.norm,)))

    @property
    def has_position_bias(self) -> bool:
        return not self.reach is self.position_bias is self.relative is None

    @property
    def keywords(self) -> tuple[str, ...]:
        return (*super().keywords, *((self.relative.keyword,) if self.relative and self.relative.keyword else ()))

    @property
    def causal(self) -> bool:
        return self.reach is not None and self.reach[1] == 0

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention:
        assert isinstance(record, EncoderRecord)
        attended = layer.attended
        if attended is None:
            raise NotUnderstood(OWN)
        if isinstance(attended, OwnAttended):
            return cls._of_own_code(layer, record, attended)
        bias, relative, calls = None, None, layer.inside(layer.attention)
        for name, value in attended.options.items():
            known = name in SHOWN | KNOWN_ARGUMENTS or name.startswith("output_") or cls.is_nothing(value)
            if (path := record.bias(value)) is not None:
                bias = PositionBias(path)
            elif not known and (found := seen_by_query(layer, attended, value, record.biases)) is not None:
                relative = found
            elif not known and (isinstance(value, torch.Tensor) or value not in (None, False)):
                raise NotUnderstood(f"its attention is told {name}")
        if attended.options.get("softcap") or attended.options.get("s_aux") is not None:
            raise NotUnderstood("its scores are capped, or go to sinks")
        functions = [function for mask, function in record.masks if mask is attended.mask]
        mask = attended.mask
        if not functions and (found := seen_by_query(layer, attended, mask, record.biases)) is not None:
            relative, mask = found, None
        starts = None if functions or record.in_windows else _starts(layer, mask, record.ends)
        unknown = len(functions) != 1 and starts is None and not record.in_windows and not _hides_nothing(mask)
        if unknown and (record.padded or mask is None or not mask.is_floating_point()):
            raise NotUnderstood(OWN_MASK)
        fields: dict[str, Any] = {"position_bias": bias, "relative": relative, "starts": starts}
        fields |= {"windows": record.in_windows, "pairs": unknown}
        fields["reach"] = reach_of(functions[0]) if functions else None
        fit = cls.first_fit(layer, calls, cls.formulas(layer, calls, fields), None)
        if fit is None:
            raise NotUnderstood("its attention is of another formula")
        return fit

    @classmethod
    def is_nothing(cls, value: object) -> bool:
        """Whether an attention that is told this computes the same without."""
        return False

    @classmethod
    def formulas(cls, layer: LayerRecord, calls: list[Call], fields: dict) -> Iterator[Formula]:
        """Those that may be of a recorded layer."""
        yield from self_formulas(layer, calls, fields, FORMS_OF_ENCODERS)
        if layer.stored is None or fields["windows"] or isinstance(layer.attended, OwnAttended):
            return
        for v_norm, before in value_norms(layer, calls, layer.stored.values.transpose(1, 2)):
            plain = replace(layer, stored=layer.stored._replace(values=before.transpose(1, 2)))
            yield from self_formulas(plain, calls, fields | {"v_norm": v_norm}, FORMS_OF_ENCODERS)

    @classmethod
    def _of_own_code(cls, layer: LayerRecord, record: Record, attended: OwnAttended) -> UnderstoodAttention:
        """Of a model that does not attend by transformers' interface."""
        hidden, keys = attended.mask, layer.cached.keys.shape[2]
        made = [(mask, function) for mask, function in record.masks if _of(mask, attended.query.shape[2], keys)]
        if hidden is not None:
            made = [one for one in made if one[0] is not None and torch.equal(_hides(one[0]), hidden)]
        reaches = {reach_of(function) for _, function in made} or ({None} if hidden is None else set())
        if not reaches and hidden is not None and bool(hidden.eq(torch.ones_like(hidden).triu(1)).all()):
            reaches = {(None, 0)}
        if len(reaches) == 1:
            bias = PositionBias(attended.bias) if attended.bias else None
            fields: dict[str, Any] = {"reach": reaches.pop(), "own_code": True, "position_bias": bias}
            fields |= {"relative": attended.relative, "added": attended.added}
            fields["windows"] = cast(EncoderRecord, record).in_windows
            calls = layer.inside(layer.attention)
            if (fit := cls.first_fit(layer, calls, cls.formulas(layer, calls, fields), None)) is not None:
                return fit
        raise NotUnderstood(OWN)

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> BoundSoftmaxAttention:
        if self.windows:
            return BoundWindowAttention(kernels, layer, self, stack)
        return BoundBidirectionalAttention(kernels, layer, self, stack)


def _of(mask: torch.Tensor | None, queries: int, keys: int) -> bool:
    """Whether a mask is one of so many queries and keys, as far as can be seen."""
    return mask is None or mask.shape[-2:] == (queries, keys)


def _hides(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask that is added to scores hides them."""
    return mask < torch.finfo(mask.dtype).min / 2


def _hides_nothing(mask: torch.Tensor | None) -> bool:
    """Whether this is added to scores of all queries alike, and is nothing: no window, however long a text is."""
    return mask is None or (mask.shape[-2] == 1 and not bool(mask.any()))


def _starts(layer: LayerRecord, mask: torch.Tensor | None, ends: list[int]) -> str | None:
    """The keyword by which the layer knows that it attends in these parts of a row, or through this mask in parts; None
    for one part. Raises NotUnderstood.
    """
    for name, value in layer.call.named.items():
        if mask is not None and value is mask and isinstance(blocks_of(mask), torch.Tensor):
            return name
        if len(ends) > 2 and isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64):
            if value.dim() == 1 and value.tolist() == ends:
                return name
    if len(ends) > 2:
        raise NotUnderstood("it attends in parts of its tokens that it is not told of")
    return None


def self_formulas(layer: LayerRecord, calls: list[Call], fields: dict, forms: Forms = FORMS) -> Iterator[Formula]:
    """Of attention whose keys and values are of the tokens that attend, which may turn in these forms."""
    attended = layer.attended
    assert attended is not None
    added = attended.added if isinstance(attended, OwnAttended) else ()
    for projections, layout in projections_of(_with_parameters(layer, calls, added), layer):
        q, k, _ = split([call.output.held for call in projections], **layout)
        if isinstance(attended, OwnAttended) and (scale := _scaled_by(layer, attended, q, k)) is not None:
            scores = UNTURNED | PLAIN | fields | {"scale": scale}
            yield Formula(projections, layout | scores, attended.output.flatten(2), None)
        for turned in turnings(layer, calls, q, k, forms):
            scale = None if turned.fields["norms_after"] else scale_of(layer, turned.queries)
            if scale is not None:
                scores = PLAIN | fields | {"scale": scale}
                yield Formula(projections, layout | turned.fields | scores, attended.output.flatten(2), None)


def _with_parameters(layer: LayerRecord, calls: list[Call], added: tuple[str, ...]) -> list[Call]:
    """Calls of projections of groups of a query, its key and its value, with these parameters in what they gave."""
    if not added:
        return calls
    query, value = (layer.attention.get_parameter(name).detach() for name in added)
    found, heads = [], layer.cached.keys.shape[1]
    for call in (one for one in calls if one.made is not None and one.output.held.shape[-1] == 3 * value.numel()):
        parts = (t.view(heads, -1) for t in (query, torch.zeros_like(value), value))
        found.append(replace(call, made=Value(call.output.held + torch.stack([*parts], 1).flatten())))
    return found


def _scaled_by(layer: LayerRecord, attended: OwnAttended, q: torch.Tensor, k: torch.Tensor) -> float | None:
    """By what projections are multiplied in scores; None where they are not what these are made of."""
    pairs = [(q, attended.query.transpose(1, 2)), (k, layer.cached.keys.transpose(1, 2))]
    if any(one.shape != wanted.shape for one, wanted in pairs):
        return None
    factors = [factor(*pair) for pair in pairs]
    fits = all(agree(one * by, wanted) for by, (one, wanted) in zip(factors, pairs, strict=True))
    if attended.factors is not None:
        # by_query meets queries as keys do, and by_key keys as queries do.
        mine, theirs = (q.new_tensor(one) for one in (factors[::-1], attended.factors))
        fits = fits and agree(theirs, mine)
    return factors[0] * factors[1] * attended.options["scaling"] if fits else None


def scale_of(layer: LayerRecord, made: torch.Tensor) -> float | None:
    """Of scores, where queries that were made, (rows, tokens, heads, D), are those that were attended with."""
    attended = layer.attended
    assert attended is not None
    wanted, told, usual = attended.query.transpose(1, 2), attended.options.get("scaling"), made.shape[-1] ** -0.5
    found = factor(made, wanted) if made.shape == wanted.shape else 0.0
    holders = (layer.attention, layer.layer)
    before = usual if agree(made * usual, wanted) else named_factor(found, made.dtype, holders)
    if before is None or not agree(made * before, wanted):
        return None
    return before * (usual if told is None else told)


def _blinded(y: torch.Tensor, v: torch.Tensor, step: Any) -> torch.Tensor:
    """What was attended, (1, T, C), where rows of padding see nothing: all values, (T, heads, D), are alike to them."""
    (batch, length), keys = step.shape, step.packing.keys[: len(step.rows), None]
    mean = v[: batch * length].unflatten(0, step.shape).mean(1).repeat_interleave(y.shape[-1] // v[0].numel(), 1)
    hidden = torch.arange(length, device=y.device) >= keys
    rows = torch.where(hidden[..., None], mean.flatten(1)[:, None], y[0, : batch * length].unflatten(0, step.shape))
    return torch.cat([rows.flatten(0, 1)[None], y[:, batch * length :]], 1)


class BoundBidirectionalAttention(BoundSoftmaxAttention):
    """One attention with the tensors it reads, over the packed tokens of a step."""

    spec: BidirectionalSpec

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: BidirectionalSpec, stack: bool):
        super().__init__(kernels, layer, spec, stack)
        self.relative = None if spec.relative is None else spec.relative.bind(layer, self.device)
        self.added = [self.module.get_parameter(name) for name in spec.added]
        self.layer = layer
        v_norm = spec.v_norm
        self.v_norm = None if v_norm is None else BoundHeadNorm(kernels, layer, v_norm, spec.dim, self.device)

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        """See `BoundSoftmaxAttention`."""
        q, k, v, gate = super().parts(outputs)
        if self.added and v is not None:
            q, v = (t + one.view(t.shape[-2:]).to(t.dtype) for t, one in zip((q, v), self.added, strict=True))
        return q, k, v if v is None or self.v_norm is None else self.v_norm(v), gate

    def prepare(self, step: Any, kwargs: dict) -> None:
        """Has the step hold what is made of these keywords: a graph has its own."""
        if self.spec.rotary is not None:
            self.angles(step, kwargs)
        if self.relative is not None and self.relative.spec.keyword:
            self.relative.tables(step, kwargs)

    def attended(self, kernels: Kernels, step: Any, parts: Parts, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`; one row with all tokens."""
        spec = self.spec
        packing = step.packing if spec.starts is None else step.packed(kwargs.get(spec.starts))
        q, k, v, _ = parts
        assert k is not None and v is not None
        rotary, inside = spec.rotary, spec.rotary is not None and spec.key_scale == 1.0
        (q, q_norm), (k, k_norm) = (
            normed(t, norm) if inside or norm is None else (norm(t), None)
            for t, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        q, k = q[0], k[0] if spec.key_scale == 1.0 else k[0] * spec.key_scale
        if rotary is not None:
            cos, sin = (one[0] for one in self.angles(step, kwargs))
            given = {"interleaved": rotary.interleaved, "q_norm": q_norm, "k_norm": k_norm}
            given |= {"parts": rotary.parts} if rotary.parts > 1 else {}
            q, k = kernels.rotated_heads(q, k, cos, sin, **given)
        alike = step.run is None and spec.starts is None  # sequences of one length
        if alike and not spec.has_position_bias and q.shape[1] == k.shape[1]:
            q, k, v = (t.unflatten(0, step.shape).transpose(1, 2) for t in (q, k, v[0]))
            dense = kernels.attention
            if spec.pairs:
                added = added_by(self.layer, step.shape[1], kwargs, self.device).to(q.dtype)
                dense = partial(F.scaled_dot_product_attention, attn_mask=added)
            return dense(q, k, v, scale=spec.scale).transpose(1, 2).reshape(1, step.shape.numel(), -1)
        more = {} if self.relative is None else self.relative(kernels, step, q, k, kwargs)
        y = kernels.packed_attention(
            more.pop("q", q), k, v[0], packing.starts, spec.scale, longest=packing.longest, keys=packing.keys,
            padding=packing.padding, bias=step.bias(spec.position_bias), **self._seen(packing), **more,
        )[None]  # fmt: skip
        return _blinded(y, v[0], step) if step.blind else y

    def _seen(self, packing: Packing) -> dict[str, Any]:
        """What of its sequence a token sees, as `accel_kernels.packed_attention` is told."""
        reach = self.spec.reach
        if reach is None or (reach == (None, 0) and not packing.mirrored):
            return {"causal": reach is not None}
        left, right = (packing.longest if far is None else far for far in reach)
        return {"window": (right, left) if packing.mirrored else (left, right)}

    def angles(self, step: Any, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotations of the packed tokens, made once for all layers that share them."""
        assert self.spec.rotary is not None
        source = self.spec.rotary.source(kwargs, self.module)
        return step.angles(source, self.spec.rotary, partial(self._angles, step, kwargs))

    def _angles(self, step: Any, kwargs: dict) -> tuple[torch.Tensor, ...]:
        """cos, sin of the packed tokens, (1, T, R / 2)."""
        assert self.spec.rotary is not None
        tables = self.spec.rotary.angles(kwargs, self.module, step.shape[1])
        return tuple(step.packing.pack(one.expand(*step.shape, -1))[None] for one in tables)
