"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): a layer's spec, and the layer with its tensors.

The cache holds a normed latent a token, and a rotated part of the key that all heads share. Keys and values of the
heads are products of the latent, which the kernel never writes for a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accel_kernels import LowRank, Norm
from accel_kernels.attention.paged.paged_attention import rotated
from torch import nn

from accel.comparison import agree, factor, named_factor
from accel.libraries.adapters import base
from accel.llm.attention.attention import AttentionSpec, UnderstoodAttention
from accel.llm.attention.gated_attention import GATE_ACTIVATIONS, gated_ends, gated_result
from accel.llm.attention.rotary import Rotary, rotary_candidates
from accel.llm.attention.softmax_attention import told
from accel.llm.kv_cache.shape import LatentShape
from accel.llm.parts.linear import Weights, weights
from accel.llm.parts.norm import NormSpec, norm_spec
from accel.llm.parts.part import BoundLinear, BoundNorm, BoundProjections, NormedInput
from accel.llm.parts.step import Step
from accel.llm.parts.written_weight import WrittenWeight
from accel.llm.recording.plain_attention import plain_attention
from accel.llm.recording.record import Attended, Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood, changed_since, plain_settings
from accel.patching.structure import comes_when_called
from accel.quantization.adapters import read_low_rank


@dataclass(frozen=True)
class LatentSpec(AttentionSpec):
    """Queries over stored latents. projections: of queries, or to what these are made of, to the latent, and perhaps of
    a gate, with an `activation`, for what each head or each channel gives.

    q_norm, q_up: of queries that come from a projection of low rank, its norm and the linear behind it; else None.
    norm: of the latent, which is then multiplied by norm_scale. up: the linear that makes a head's key and value of a
    latent. heads: of `nope` channels of their own and `rope` shared ones, and of `values`. rank, rotary, to_halves,
    scale: as `latent_attention` takes them.
    """

    q_norm: NormSpec | None
    q_up: str | None
    norm: NormSpec
    up: str
    heads: int
    rank: int
    nope: int
    rope: int
    values: int
    rotary: Rotary | None
    to_halves: bool
    scale: float
    norm_scale: float = 1.0
    activation: str | None = None

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        return (self.norm,) if self.q_norm is None else (self.q_norm, self.norm)

    @property
    def linears(self) -> tuple[str, ...]:
        return (*super().linears, self.up, *(() if self.q_up is None else (self.q_up,)))

    @property
    def keywords(self) -> tuple[str, ...]:
        if self.rotary is None:
            return ()
        return (self.rotary.name if self.rotary.given else "position_ids",)

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        if layer.stored is None:
            return None
        stored, calls = layer.stored, layer.inside(layer.stored.attention)
        if stored.keys.shape[1] != 1 or stored.values.shape[1] != 1 or stored.keys.dtype != stored.values.dtype:
            return None
        latents = next(_latents(layer, calls), None)
        if latents is None:
            return None
        down, normed, norm_scale = latents
        attended = layer.attended
        if attended is None:
            raise NotUnderstood("its latents are not attended to by transformers' own functions")
        options, window, _ = told(layer, record)
        if window is not None:
            raise NotUnderstood("its latents are seen through a sliding window")
        if any(options.get(name) is not None for name in ("softcap", "s_aux")):
            raise NotUnderstood("the scores of its latents are capped, or have sinks")
        norm = norm_spec(layer, normed)
        if norm.kind is None or norm.kind.centered or norm.kind.bias is not None or norm.kind.weight is None:
            raise NotUnderstood("the norm of its latents is of another formula")
        rank, rope = stored.keys.shape[3], stored.values.shape[3]
        heads, width = attended.query.shape[1], attended.query.shape[3]
        shared = down.output.held[..., None, rank:]
        for rotary, to_halves in _rotations(layer, shared, stored.values.transpose(1, 2)):
            for q, before in _queries(layer, calls, attended, width - rope, rotary, to_halves):
                for up, values, got in _attended(calls, stored.keys, stored.values, attended, width - rope):
                    ending, ways = next(_endings(layer, calls, got, down, heads), None), _ways(calls, q, down)
                    if ending is None or ways is None:
                        continue
                    (out, gate, activation), (first, q_normed) = ending, ways
                    projections = (first, down, *([] if gate is None else [gate]))
                    told_scale = options.get("scaling")
                    spec = cls(
                        layer.name(stored.attention),
                        plain_settings(stored.attention),
                        tuple(layer.name(call.module) for call in projections),
                        layer.name(out.module),
                        stored.place,
                        None,
                        q_norm=None if q_normed is None else norm_spec(layer, q_normed),
                        q_up=None if q_normed is None else layer.name(q.module),
                        norm=norm,
                        up=layer.name(up.module),
                        heads=heads,
                        rank=rank,
                        nope=width - rope,
                        rope=rope,
                        values=values,
                        rotary=rotary,
                        to_halves=to_halves,
                        scale=before * (width**-0.5 if told_scale is None else told_scale),
                        norm_scale=norm_scale,
                        activation=activation,
                    )
                    return UnderstoodAttention(spec, first, out)
        raise NotUnderstood("its queries, scores or result are of another formula than latent attention's")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundLatentAttention":
        return BoundLatentAttention(kernels, layer, self, stack)

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> LatentShape:
        return LatentShape(self.rank, self.rope, self.heads, dtype, device, kv_dtype)

    def products(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes a head's own part of keys, (heads, nope, rank), and its values, (heads, values, rank)."""
        up, adapters = adapted_weights(layer.get_submodule(self.up), torch.float32)
        if up is None or adapters is None:
            raise NotUnderstood(changed_since(self.up))
        plain = written_out(up.operands()[0], adapters, torch.float32)
        keys, values = plain.unflatten(0, (-1, self.nope + self.values)).split((self.nope, self.values), dim=1)
        return keys, values


class BoundLatentAttention:
    """One latent attention with the tensors it reads. Raises NotUnderstood where the op cannot take them."""

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: LatentSpec, stack: bool):
        self.spec, self.module = spec, layer.get_submodule(spec.name)
        # What queries are made of, the latents before their norm with the shared parts of keys, and any gate.
        self.projections = BoundProjections(layer, spec.projections, stack)
        self.q_norm = None if spec.q_norm is None else BoundNorm(kernels, layer, spec.q_norm)
        self.q_up = None if spec.q_up is None else BoundLinear(layer.get_submodule(spec.q_up))
        norm = layer.get_submodule(spec.norm.name)
        if spec.norm.kind is None or not as_understood(norm, spec.norm.settings):
            raise NotUnderstood("the norm of its latents is another now")
        self.norm = spec.norm.kind.of(norm)
        self.dtype = torch.float32 if self.norm.weight is None else self.norm.weight.dtype
        up, adapters = adapted_weights(layer.get_submodule(spec.up), self.dtype)
        if up is None or adapters is None or up.transposed or up.ranks is not None or up.operands()[1] is not None:
            raise NotUnderstood("what makes keys and values of its latents is no plain linear")
        self.up, self.adapters = up, adapters
        self.written: WrittenWeight | None = None
        # The op reads plain numbers: they are few beside the other weights. What streams is not there yet.
        if up.quantized and not comes_when_called(layer):
            self.written = WrittenWeight(up, self.dtype)

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        q, compressed, *gate = self.projections(kernels, h)
        if self.q_up is not None:
            q = self.q_up(kernels, NormedInput(q.contiguous(), self.q_norm))
        return self.gated(self.attended(kernels, step, q, compressed, step.kvs[self.spec.index], kwargs), *gate)

    def angles(self, step: Step, kwargs: dict) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Cosines and sines; None without a rotation."""
        rotary = self.spec.rotary
        if rotary is None:
            return None, None
        return step.angles(rotary.source(kwargs, self.module), rotary, lambda: rotary.angles(kwargs, self.module))

    def weight(self, kv: Any) -> torch.Tensor:
        """What makes keys and values of latents, for tokens of this store; anew where it may change in place: what is
        written out where a text begins, and what adapters add in each call.
        """
        written = self.written
        if written is not None and (kv.is_prefill if kv.ragged is None else kv.ragged.most_prefills):
            written.write()
        return written_out(self.up.operands()[0] if written is None else written.numbers, self.adapters, self.dtype)

    def scaled_norm(self) -> Norm:
        """Of the latents; made anew where they are multiplied, as the weight may change in place."""
        norm, scale = self.norm, self.spec.norm_scale
        return norm if scale == 1.0 or norm.weight is None else norm._replace(weight=norm.weight.float() * scale)

    def gated(self, y: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        """What is projected."""
        return y if self.spec.activation is None else gated_result(y, gate[0], self.spec.activation)

    def attended(
        self, kernels: Kernels, step: Step, q: torch.Tensor, compressed: torch.Tensor, kv: Any, kwargs: dict
    ) -> torch.Tensor:
        """What queries see of a store, once the new latents are in it."""
        spec, rotary = self.spec, self.spec.rotary
        cos, sin = self.angles(step, kwargs)
        return kernels.latent_attention(
            q.unflatten(-1, (-1, spec.nope + spec.rope)), compressed, kv,
            self.weight(kv).unflatten(0, (-1, spec.nope + spec.values)), spec.scale, norm=self.scaled_norm(),
            cos=cos, sin=sin,
            interleaved=rotary is not None and rotary.interleaved, to_halves=spec.to_halves, dense=kernels.prompt,
        )  # fmt: skip


def adapted_weights(linear: nn.Module, dtype: torch.dtype) -> tuple[Weights | None, tuple[LowRank, ...] | None]:
    """Of a linear and of the adapters around it, for rows of this dtype; None for what does anything else."""
    inner = base(linear)
    return weights(inner), () if inner is linear else read_low_rank(linear, dtype)


def written_out(weight: Any, adapters: tuple[LowRank, ...], dtype: torch.dtype) -> torch.Tensor:
    """A weight as plain numbers, with what adapters add to it: the op multiplies queries by it, no latents."""
    plain = weight if isinstance(weight, torch.Tensor) else weight.dequantized(dtype)
    for one in adapters:
        plain = torch.addmm(plain, one.up.to(plain.dtype), one.down.to(plain.dtype), alpha=one.scale)
    return plain


def _latents(layer: LayerRecord, calls: list[Call]) -> Iterator[tuple[Call, Call, float]]:
    """The projection of latents and shared parts of keys, and the norm of which a multiple is stored."""
    stored = layer.cached
    rows, _, tokens, rank = stored.keys.shape
    flat = [call for call in calls if call.alone and call.made is not None]
    for normed in flat:
        made = normed.output.held
        if made.numel() != stored.keys.numel():
            continue
        made = made.reshape(stored.keys.shape)
        scale = named_factor(factor(made, stored.keys), made.dtype, (layer.attention,))
        if scale is None or not torch.equal(made * scale, stored.keys):
            continue
        for down in flat:
            y = down.output.held
            if y.shape != (rows, tokens, rank + stored.values.shape[3]):
                continue
            if torch.equal(y[..., :rank].flatten(), normed.input.held.flatten()):
                yield down, normed, scale


def _endings(
    layer: LayerRecord, calls: list[Call], got: torch.Tensor, down: Call, heads: int
) -> Iterator[tuple[Call, Call | None, str | None]]:
    """The last projection, and the one of a gate of what it is given, with its activation; None for no gate."""
    known = None if layer.known is None else layer.known.attention
    yield from ((c, None, None) for c in calls if c.alone and agree(got, c.input.held, slack=2.0))
    for gate in (call for call in calls if call.alone and call.made is not None and call.input.same(down.input)):
        if gate is down or gate.output.held.shape[-1] not in (heads, got.shape[-1]):
            continue
        for activation in GATE_ACTIVATIONS if known is None else filter(None, [known.activation]):
            for out in gated_ends(layer, calls, got, gate.output.held, activation):
                yield out, gate, activation


def _turned(layer: LayerRecord, t: torch.Tensor, rotary: Rotary | None, to_halves: bool) -> torch.Tensor:
    """(rows, tokens, heads, P) rotated by the positions of a record; with `to_halves` pairs come apart."""
    if rotary is None:
        return t
    t = rotated(t, *rotary.angles(layer.call.named, layer.attention), rotary.interleaved)
    return torch.cat((t[..., ::2], t[..., 1::2]), dim=-1) if to_halves else t


def _rotations(layer: LayerRecord, t: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[Rotary | None, bool]]:
    """The rotations that turn t into this, both (rows, tokens, 1, P), and whether pairs come apart."""
    if agree(t, wanted):
        yield None, False
    for rotary in rotary_candidates(layer):
        if 2 * rotary.angles(layer.call.named, layer.attention)[0].shape[-1] != t.shape[-1]:
            continue
        for to_halves in (False, True)[: 1 + rotary.interleaved]:
            if agree(_turned(layer, t, rotary, to_halves), wanted):
                yield rotary, to_halves


def _queries(
    layer: LayerRecord, calls: list[Call], attended: Attended, nope: int, rotary: Rotary | None, to_halves: bool
) -> Iterator[tuple[Call, float]]:
    """The linear that gives the queries, and the number that the layer multiplies them by."""
    wanted = attended.query.transpose(1, 2)
    for call in calls:
        if not call.alone or call.made is None or call.output.held.shape[:2] != wanted.shape[:2]:
            continue
        if call.output.held.numel() != wanted.numel():
            continue
        q = call.output.held.reshape(wanted.shape)
        q = torch.cat((q[..., :nope], _turned(layer, q[..., nope:], rotary, to_halves)), dim=-1)
        before = named_factor(factor(q, wanted), q.dtype, (layer.attention, layer.layer))
        if before is not None and agree(q * before, wanted):
            yield call, before


def _attended(
    calls: list[Call], latents: torch.Tensor, shared: torch.Tensor, attended: Attended, nope: int
) -> Iterator[tuple[Call, int, torch.Tensor]]:
    """The linear that makes keys and values of latents, channels of a value, and what attention to these gives.

    By the recorded queries: so also scores that choose one key choose the same.
    """
    rows, heads, tokens, _ = attended.query.shape
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=latents.device).triu(1)
    mask = torch.zeros(tokens, tokens, device=latents.device).masked_fill(future, -torch.inf)
    options = {"scaling": attended.options.get("scaling")}
    for call in calls:
        if not call.alone or call.made is None or not torch.equal(call.input.held.flatten(), latents.flatten()):
            continue
        if getattr(call.module, "bias", None) is not None:  # which the kernel does not add
            continue
        made, rest = divmod(call.output.held.numel(), rows * tokens * heads)
        if rest or made <= nope:
            continue
        expanded = call.output.held.reshape(rows, tokens, heads, made).transpose(1, 2)
        keys = torch.cat((expanded[..., :nope], shared.expand(-1, heads, -1, -1)), dim=-1)
        got = plain_attention(attended.query, keys, expanded[..., nope:], mask, **options)
        yield call, made - nope, got.flatten(2)


def _ways(calls: list[Call], q: Call, down: Call) -> tuple[Call, Call | None] | None:
    """The projection of the layer's input from which queries come, and the norm between both; None for other ways."""
    if q.input.same(down.input):
        return q, None
    for normed in calls:
        if normed.alone and normed.made is not None and normed.output.same(q.input):
            for first in calls:
                if first.alone and first.made is not None and first.output.same(normed.input):
                    return (first, normed) if first.input.same(down.input) else None
    return None
