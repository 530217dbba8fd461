"""Latent attention to the tokens that an index chooses, as of DeepSeek-V3.2 and GLM-5 (DeepSeek sparse attention).

The indexer is called as it is, over index keys of its own in the caller's cache. While it chooses all tokens there are,
this is latent attention; after that a step hides the others from the kernel as padding, and a prompt masks them.
"""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from accel_kernels import KV
from accel_kernels.attention.paged.kv import PADDING_MASK
from accel_kernels.attention.paged.paged_attention import rotated
from accel_kernels.gemm.fused_linear import apply_norm
from torch import Tensor, nn

from accel.llm.attention.attention import UnderstoodAttention
from accel.llm.attention.latent_attention import BoundLatentAttention, LatentSpec
from accel.llm.attention.stock.stock_attention import INPUT, Arguments, called
from accel.llm.parts.part import NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import LayerRecord, NotUnderstood, Record, Value
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_value

INDICES = "indices"  # as transformers' attention functions are told which tokens count
QUERIES, MASK = "what queries are made of", "the mask without heads"


@dataclass(frozen=True, kw_only=True)
class IndexedSpec(LatentSpec):
    """indexer: the module that chooses; "" where the layer is told by its argument `chosen`. given: see `called`. mask:
    the layer's argument. behind: of what the layer gives behind its output, whether it is the choice; else nothing.
    """

    indexer: str
    given: Arguments
    chosen: str
    mask: str
    behind: tuple[bool, ...]

    @property
    def linears(self) -> tuple[str, ...]:
        return (*super().linears, *((self.indexer,) if self.indexer else ()))

    @property
    def keeps_more(self) -> str | None:
        return "it chooses tokens by an index, which runs stock"

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> UnderstoodAttention | None:
        attended = layer.attended
        indices = None if attended is None else attended.options.get(INDICES)
        if attended is None or not isinstance(indices, Tensor):
            return None
        options = {name: value for name, value in attended.options.items() if name != INDICES}
        with suppress(NotUnderstood):
            found = LatentSpec.understand(replace(layer, attended=replace(attended, options=options)), record)
            told, behind = None if found is None else _told(layer, record, found, indices), _behind(layer, indices)
            if found is not None and told is not None and behind is not None:
                of_latents = {one.name: getattr(found.spec, one.name) for one in fields(LatentSpec)}
                return found._replace(spec=cls(**of_latents, **told, behind=behind))
        raise NotUnderstood("it chooses tokens by an index, and is no latent attention that is known")

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> "BoundIndexedAttention":
        return BoundIndexedAttention(kernels, layer, self, stack)


class BoundIndexedAttention(BoundLatentAttention):
    """The same with an indexer."""

    spec: IndexedSpec

    def __init__(self, kernels: Kernels, layer: nn.Module, spec: IndexedSpec, stack: bool):
        super().__init__(kernels, layer, spec, stack)
        self.indexer = layer.get_submodule(spec.indexer) if spec.indexer else None

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> Tensor:
        """See `BoundAttention`."""
        x, spec, kv = h.normed(), self.spec, step.kvs[self.spec.index]
        assert isinstance(kv, KV)
        low, compressed, *gate = self.projections(kernels, NormedInput(x))
        q = low = low.contiguous()
        if self.q_up is not None and self.q_norm is not None:
            low = self.q_norm(low)
            q = self.q_up(kernels, NormedInput(low))
        mask = kwargs[spec.mask]
        chosen = self._chosen({INPUT: x, QUERIES: low, MASK: mask[:, 0]} | kwargs)
        if spec.behind:
            step.behind = tuple(chosen if one else None for one in spec.behind)
        tokens = mask.shape[-1]
        if chosen.shape[-1] == tokens:
            return self.gated(self.attended(kernels, step, q, compressed, kv, kwargs), *gate)
        shown = torch.zeros(*chosen.shape[:2], tokens, dtype=torch.bool, device=x.device)
        shown.scatter_(-1, chosen.long(), True)
        if shown.shape[1] == 1:
            return self.gated(self.attended(kernels, step, q, compressed, _hidden(kv, shown[:, 0]), kwargs), *gate)
        seen = (mask if mask.dtype == torch.bool else mask == 0) & shown.unsqueeze(1)
        return self.gated(self._by_mask(q, compressed, kv, seen, self.angles(step, kwargs)), *gate)

    def _chosen(self, named: dict[str, Any]) -> Tensor:
        """(rows, new, number) integers, the tokens that each new one sees."""
        if self.indexer is None:
            return named[self.spec.chosen]
        return called(self.indexer, self.spec.given, named)

    def _by_mask(
        self, q: Tensor, compressed: Tensor, kv: KV, seen: Tensor, angles: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Stores the new latents and attends to those that are seen, (1 or rows, 1, new, tokens)."""
        spec, up = self.spec, self.weight(kv).unflatten(0, (-1, self.spec.nope + self.spec.values))
        q = q.unflatten(-1, (-1, spec.nope + spec.rope))
        turning = torch.cat((q[..., spec.nope :], compressed[..., None, spec.rank :]), dim=2)
        if spec.rotary is not None:
            turning = rotated(turning, *angles, spec.rotary.interleaved)
        if spec.rotary is not None and spec.to_halves:
            turning = torch.cat((turning[..., ::2], turning[..., 1::2]), dim=-1)
        latent = apply_norm(compressed[..., : spec.rank].contiguous(), self.scaled_norm()).unsqueeze(2)
        new, tokens = seen.shape[-2:]
        kv.write(tokens - new, torch.cat((latent, turning[:, :, -1:]), dim=-1), latent)
        stored, latents = kv.read(tokens, q.dtype)
        expanded = F.linear(latents.squeeze(2), up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        shared = stored[..., spec.rank :].expand(-1, -1, up.shape[0], -1)
        keys = torch.cat((expanded[..., : spec.nope], shared), dim=-1)
        queries = torch.cat((q[..., : spec.nope], turning[:, :, :-1]), dim=-1)
        seen = seen | ~seen.any(-1, keepdim=True)  # of padding, whose result nobody reads, no NaN
        q, k, v = (one.transpose(1, 2) for one in (queries, keys, expanded[..., spec.nope :]))
        return F.scaled_dot_product_attention(q, k, v, seen, scale=spec.scale).transpose(1, 2).flatten(2)


def _hidden(kv: KV, shown: Tensor) -> KV:
    """The store, of which these tokens alone are seen, (rows, tokens)."""
    whole = F.pad(shown, (0, kv.table.shape[1] * kv.block - shown.shape[1]))
    if kv.padding_mask is not None:
        whole &= kv.padding_mask
    metadata = kv.metadata.clone()
    metadata[PADDING_MASK] = whole.data_ptr()
    return kv._replace(padding_mask=whole, metadata=metadata)


def _told(layer: LayerRecord, record: Record, found: UnderstoodAttention, indices: Tensor) -> dict[str, Any] | None:
    """How the layer comes by its choice; None for a way that is not known."""
    of_layer, spec = layer.call.named, found.spec
    mask = next((name for name, value in of_layer.items() if value is not None and record.made(value)), None)
    if mask is None or not isinstance(spec, LatentSpec):
        return None
    chosen = next((name for name, value in of_layer.items() if value is indices), None)
    if chosen is not None:
        return {"indexer": "", "given": (), "chosen": chosen, "mask": mask}
    call = next((one for one in layer.inside(layer.attention) if one.result is indices), None)
    if call is None:
        return None
    norm = "" if spec.q_norm is None else spec.q_norm.name
    made = {call.made.tensor.data_ptr() for call in layer.calls if call.made and layer.name(call.module) == norm}
    given: list[tuple[int | str, str]] = []
    for name, value in (*enumerate(call.args), *call.kwargs.items()):
        source = next((one for one, held in of_layer.items() if value is held and not plain_value(value)), "")
        if isinstance(value, Tensor) and not source:
            if found.first.input.same(Value(value)):
                source = INPUT
            elif value.data_ptr() in made:
                source = QUERIES
            elif value.data_ptr() == of_layer[mask].data_ptr() and value.shape == of_layer[mask][:, 0].shape:
                source = MASK
        if not source and value is not None:
            return None
        given.append((name, source))
    return {"indexer": layer.name(call.module), "given": tuple(given), "chosen": "", "mask": mask}


def _behind(layer: LayerRecord, indices: Tensor) -> tuple[bool, ...] | None:
    """Which of what the layer gives behind its output is the choice; None where it gives something else."""
    behind = layer.call.result[1:] if isinstance(layer.call.result, tuple) else ()
    known = all(value is None or value is indices for value in behind)
    return tuple(value is not None for value in behind) if known else None
