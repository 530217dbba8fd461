"""Attention of a step over the fixed memory: its own keys and values behind the earlier ones, or the encoder's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import paged_attention
from accel_kernels.attention.paged.kv import KV, LENGTH
from accel_kernels.op import dtype_reason
from torch import nn

from accel.encoders.bidirectional_attention import PLAIN, BidirectionalSpec, scale_of, self_formulas
from accel.encoders.position_bias import PositionBias
from accel.llm.attention.softmax_attention import BoundSoftmaxAttention, Formula, Parts, normed
from accel.llm.parts.part import BoundProjections, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord
from accel.patching.fast_forward import Kernels
from accel.seq2seq.fixed_memory import CROSS, OWN, Holding

QUERIES = "queries"  # a layout: queries alone are projected, as keys and values are there
MOST_CHANNELS = 512  # of a head, that `paged_attention` takes


class MemoryStep(Step):
    """What the layers of a step share. start: tokens before it, (), int64. masks: by part of the memory (rows, room) of
    those that count, or None for all. biases: by path, see `PositionBias.bind`.

    Nothing that its operations do hangs on lengths in Python.
    """

    __slots__ = ("biases", "holding", "masks", "start", "stores", "tables")

    def __init__(
        self,
        kernels: Kernels,
        holding: Holding,
        start: torch.Tensor,
        masks: Sequence[torch.Tensor | None],
        biases: dict[str, tuple[torch.Tensor, torch.Tensor]],
    ):
        super().__init__({})
        self.holding, self.start, self.masks, self.biases = holding, start, masks, biases
        self.tables: dict[str, torch.Tensor] = {}
        self.stores = [holding.store(part) if self.pages(kernels, part) else None for part in (OWN, CROSS)]
        for part, (store, mask) in enumerate(zip(self.stores, masks, strict=True)):
            if store is not None and part == OWN:
                store.metadata[LENGTH : LENGTH + 1].copy_(start)
            if store is not None and mask is not None:
                store.mask[:, : mask.shape[1]].copy_(mask)

    def pages(self, kernels: Kernels, part: int) -> bool:
        """Whether that part is read as a store: by a kernel that no mask has to tell how much of it counts."""
        kept = self.holding.kept[part]
        own = kept.is_cuda and kernels.paged_attention is paged_attention  # and not a user's
        return own and dtype_reason(self.holding.kept[OWN]) is None and kept.shape[-1] <= MOST_CHANNELS

    def kv(self, part: int, index: int) -> KV | None:
        """What a layer has in that part, as a store."""
        store = self.stores[part]
        if store is None:
            return None
        return store.kvs[index] if self.masks[part] is not None else store.kvs[index]._replace(padding_mask=None)

    def biases_of(self, bias: PositionBias) -> torch.Tensor:
        """What a bias adds to scores, (heads, room). Made once for all layers."""
        if (found := self.tables.get(bias.path)) is None:
            weight, rows = self.biases[bias.path]
            far, places = len(rows) // 2, torch.arange(self.holding.room(OWN), device=weight.device)
            found = weight[rows[(places - self.start + far).clamp(0, 2 * far)]].t().contiguous()
            self.tables[bias.path] = found
        return found

    def hidden(self, part: int) -> torch.Tensor | None:
        """What hides the tokens that do not count, added to scores, (1 or rows, 1, 1, room); None for nothing."""
        kept, seen = self.holding.kept[part], self.masks[part]
        if part == OWN:
            return hiding(up_to(self.start, kept.shape[4], seen), kept.dtype)
        return None if seen is None else hiding(seen[:: self.holding.beams].bool(), self.holding.dtype)


def up_to(start: torch.Tensor, room: int, padding: torch.Tensor | None) -> torch.Tensor:
    """Which tokens a new one at `start` sees, (1 or rows, room). padding: (rows, room) of those that count, or None."""
    before = (torch.arange(room, device=start.device) <= start)[None]
    return before if padding is None else before & padding.bool()


def hiding(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(rows, tokens) as numbers that are added to scores: (rows, 1, 1, tokens)."""
    none = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return none.masked_fill(~seen, torch.finfo(dtype).min)[:, None, None]


@dataclass(frozen=True)
class MemorySpec(BidirectionalSpec):
    """Of the tokens of the decoder; or, in the layout QUERIES, of what the encoder gave.

    sources: linears of that which give values and keys; none where these are made in another way.
    """

    sources: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        return (*self.projections, *self.sources, self.out)

    @property
    def part(self) -> int:
        return CROSS if self.layout == QUERIES else OWN

    @classmethod
    def is_nothing(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(value.any())  # as in T5

    @classmethod
    def formulas(cls, layer: LayerRecord, calls: list[Call], fields: dict) -> Iterator[Formula]:
        return chain(self_formulas(layer, calls, fields), _of_queries(layer, calls, fields))

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundMemoryAttention":
        return BoundMemoryAttention(kernels, layer, self, stack)


def _of_queries(layer: LayerRecord, calls: list[Call], fields: dict) -> Iterator[Formula]:
    attended = layer.attended
    assert attended is not None
    rows, heads, tokens, dim = attended.query.shape
    kept = layer.cached
    groups = kept.keys.shape[1]
    layout = {"layout": QUERIES, "heads": heads, "groups": groups, "kv_heads": groups, "dim": dim}
    known = [call for call in calls if call.alone and call.made is not None and call.output.held.dim() == 3]
    flat = [one.transpose(1, 2).flatten(2) for one in (kept.values, kept.keys)]
    found = [next((call for call in known if torch.equal(call.output.held, one)), None) for one in flat]
    sources = tuple(layer.name(call.module) for call in found if call is not None)
    none = {"q_norm": None, "k_norm": None, "key_scale": 1.0, "rotary": None, "norms_after": False}
    for call in calls:
        if call.alone and call.made is not None and call.output.held.shape == (rows, tokens, heads * dim):
            scale = scale_of(layer, call.output.held.unflatten(-1, (heads, dim)))
            if scale is not None:
                scores = PLAIN | fields | {"scale": scale, "sources": sources if len(sources) == 2 else ()}
                yield Formula((call,), layout | none | scores, attended.output.flatten(2), None)


class BoundMemoryAttention(BoundSoftmaxAttention):
    """One attention with the tensors it reads."""

    spec: MemorySpec

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: MemorySpec, stack: bool):
        super().__init__(kernels, layer, spec, stack)
        self.sources = BoundProjections(layer, spec.sources, stack)

    def sources_of(self, kernels: Kernels, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Keys and values of what the encoder gave, (rows, tokens, C), each (rows, heads, tokens, D)."""
        values, keys = self.sources(kernels, NormedInput(hidden))
        return tuple(one.unflatten(-1, (-1, self.spec.dim)).transpose(1, 2) for one in (keys, values))

    def parts(self, outputs: Sequence[torch.Tensor]) -> Parts:
        if self.spec.part == OWN:
            return super().parts(outputs)
        return outputs[0].unflatten(-1, (-1, self.spec.dim)), None, None, None

    def attended(self, kernels: Kernels, step: Any, parts: Parts, kwargs: dict) -> torch.Tensor:
        """See `BoundAttention`."""
        spec, (q, k, v, _) = self.spec, parts
        kv, bias, rotary = step.kv(spec.part, spec.index), None, spec.rotary
        if spec.position_bias is not None:
            bias = step.biases_of(spec.position_bias)
        (q, q_norm), (k, k_norm) = (
            normed(t, norm) if kv is not None or norm is None or t is None else (norm(t), None)
            for t, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        cos = sin = None
        if rotary is not None:
            source = rotary.source(kwargs, self.module)
            cos, sin = step.angles(source, rotary, lambda: rotary.angles(kwargs, self.module))
        if kv is not None:
            more = {"cos": cos, "sin": sin, "interleaved": rotary.interleaved} if rotary is not None else {}
            more |= {"q_norm": q_norm, "k_norm": k_norm, **({} if bias is None else {"bias": bias})}
            return kernels.paged_attention(q, k, v, kv, spec.scale, **more)
        if rotary is not None and cos is not None and sin is not None:
            angles = (one.expand(len(q), -1, -1)[:, 0] for one in (cos, sin))
            turned = kernels.rotated_heads(q[:, 0], k[:, 0], *angles, interleaved=rotary.interleaved)
            q, k = (one[:, None] for one in turned)
        memory = step.holding.all_of(spec.part, spec.index)
        if k is not None and v is not None:
            for kept, new in zip(memory, (k, v), strict=True):
                kept.index_copy_(2, step.start.reshape(1), new.transpose(1, 2))
        keys, values = memory
        q = q.flatten(0, 1).unflatten(0, (len(keys), -1))  # beams of one text are queries of one row
        given = step.hidden(spec.part)
        given = given if bias is None else bias[:, None] + given
        grouped = keys.shape[1] != q.shape[2]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, given, scale=spec.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1).flatten(1)[:, None]
