"""What every kind of attention says of itself: how it is understood, bound to weights, and laid out in a cache.

A kind is a class of specs in a file of its own, and a name in `ATTENTION_KINDS` of `kinds.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accel.llm.kv_cache.shape import LayerShape
from accel.llm.parts.norm import NormSpec
from accel.llm.parts.part import BoundLinear, NormedInput
from accel.llm.parts.step import Step
from accel.llm.recording.record import Call, LayerRecord, Record
from accel.patching.fast_forward import Kernels
from accel.patching.guard import plain_settings


class BoundAttention(Protocol):
    """An attention with the tensors it reads, but for its last projection, which the layer adds to its input.

    projections: how many read the input, which decides whether a norm before them is done inside each.
    """

    @property
    def projections(self) -> Sequence: ...

    def __call__(self, kernels: Kernels, step: Step, h: NormedInput, kwargs: dict) -> torch.Tensor:
        """(rows, new, K), what the last projection is given. step: has the layer's store. kwargs: of the layer."""


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention computes; a kind's own spec adds its formula.

    name: from the layer, as all names here; settings: of that module, see `plain_settings`. projections: linears that
    the normed input of the layer goes through; out: the linear of the result, behind which the layer adds its input.
    index: the layer's place in the cache. window: how many tokens back it sees; None for all.
    """

    name: str
    settings: tuple
    projections: tuple[str, ...]
    out: str
    index: int
    window: int | None

    @property
    def mixers(self) -> "tuple[AttentionSpec, ...]":
        """Those that it is made of, each with a place of its own."""
        return (self,)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Those inside, as of queries and keys."""
        return ()

    @property
    def linears(self) -> tuple[str, ...]:
        """All, by name."""
        return (*self.projections, self.out)

    @property
    def has_position_bias(self) -> bool:
        """Whether what it computes depends on the distance between tokens as a mask counts it."""
        return False

    @property
    def keeps_state(self) -> bool:
        """Whether its layer keeps a state, into which every token goes, instead of keys and values."""
        return False

    @property
    def borrows(self) -> bool:
        """Whether it stores nothing, and attends to what another layer has at its place in the cache."""
        return False

    @property
    def keeps_more(self) -> str | None:
        """Why the caller's cache keeps something of it that no store does; None where a store keeps all."""
        return None

    @property
    def limits_prompts(self) -> bool:
        """Whether it computes something else of a token in a prompt than of one that comes alone."""
        return False

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keywords of its layer's call that it computes by, as of positions."""
        return ()

    def completed(self, found: "AttentionSpec") -> "AttentionSpec":
        """With what shows only at late positions, as `found` there."""
        return self

    def kernel_key(self) -> str:
        """Equal for attentions that launch the same kernels."""
        return repr(replace(self, index=0, settings=()))

    @classmethod
    def understand(cls, layer: LayerRecord, record: Record) -> "UnderstoodAttention | None":
        """None for an attention of another kind. Raises NotUnderstood for one of this kind with a step not known."""
        raise NotImplementedError

    def bind(self, kernels: Kernels, layer: nn.Module, stack: bool) -> BoundAttention:
        """With the tensors of a layer. stack: weights may be moved into one storage."""
        raise NotImplementedError

    def bind_out(self, layer: nn.Module) -> Any:
        """The last projection, called as a `BoundLinear`."""
        return BoundLinear(layer.get_submodule(self.out))

    def cache_layout(self, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None) -> LayerShape:
        """What the layer's store holds for each token, or for a row."""
        raise NotImplementedError


@dataclass(frozen=True)
class StateSpec(AttentionSpec):
    """One whose layer keeps a state."""

    @property
    def keeps_state(self) -> bool:
        return True

    @classmethod
    def understood(cls, layer: LayerRecord, first: Sequence[Call], out: Call, *formula: Any) -> "UnderstoodAttention":
        """Of the first projections, the last one, and what the kind's own spec adds."""
        assert layer.kept is not None
        own = layer.name(layer.kept.attention), plain_settings(layer.kept.attention)
        names = tuple(layer.name(call.module) for call in first), layer.name(out.module)
        return UnderstoodAttention(cls(*own, *names, layer.kept.place, None, *formula), first[0], out)


class UnderstoodAttention(NamedTuple):
    """A spec; in the record the calls of the first projection and of the last, whose output leaves the attention."""

    spec: AttentionSpec
    first: Call
    last: Call
