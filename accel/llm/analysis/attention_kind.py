"""A kind of attention: how one is understood from a record, how it is bound to weights, what it keeps in a cache.

Kinds are tried in turn; `accel.llm.runtime.attention_kinds` lists them. One more is a file here, which understands it,
a file in `runtime`, which computes it, and a line in that list: none of the others changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from accel.llm.analysis.norm import NormSpec
from accel.llm.kv_cache.shape import Shape
from accel.llm.recording.record import Call, LayerRecord, NotUnderstood, Record
from accel.patching.fast_forward import Kernels


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention is, of any kind; a kind's own spec adds its formula.

    name: from the layer, as all names here; settings: of that module, see `settings`. projections: linears that the
    normed input of the layer goes through; out: the linear of the result, behind which the layer adds its input.
    index: the layer's place in the cache.
    """

    name: str
    settings: tuple
    projections: tuple[str, ...]
    out: str
    index: int

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Those inside, as of queries and keys."""
        return ()

    @property
    def sees(self) -> int | None:
        """How many tokens back, of a sliding window; None for all."""
        return None

    @property
    def counts_distance(self) -> bool:
        """Whether what it computes depends on the distance between tokens as a mask counts it."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """The keywords of its layer's call that it computes by, as of positions."""
        return ()

    def kernel_key(self) -> str:
        """Equal for attentions that launch the same kernels."""
        return repr(replace(self, index=0, settings=()))


Spec = TypeVar("Spec", bound=AttentionSpec)


class Understood(NamedTuple):
    """A spec; in the record the calls of the first projection and of the last, whose output leaves the attention."""

    spec: AttentionSpec
    first: Call
    last: Call


class BoundAttention(Protocol):
    """An attention with the tensors it reads, but for its last projection, which the layer adds to its input.

    projections: how many read the input, which decides whether a norm before them is done inside each.
    """

    @property
    def projections(self) -> Sequence: ...

    def __call__(self, kernels: Kernels, step: Any, h: Any, kwargs: dict) -> torch.Tensor:
        """(rows, new, K), what the last projection is given. step: the `Step` under way, which has the layer's store.
        h: the `NormedInput`. kwargs: what the layer was called with.
        """


@dataclass(frozen=True)
class AttentionKind(Generic[Spec]):
    """One kind. spec: the class of its specs.

    understand: (layer's record, whole record) -> Understood; None for an attention of another kind; raises
        NotUnderstood for one of this kind with something in it that is not known.
    bind: (kernels, layer, spec, stack) -> BoundAttention. stack: weights may be moved into one storage.
    cache_layout: (spec, dtype, device, kv_dtype) -> Shape, what a layer's store holds for each token.
    """

    name: str
    spec: type[Spec]
    understand: Callable[[LayerRecord, Record], Understood | None]
    bind: Callable[[Kernels, nn.Module, Spec, bool], BoundAttention]
    cache_layout: Callable[[Spec, torch.dtype, torch.device, torch.dtype | None], Shape]


def understand_attention(layer: LayerRecord, record: Record, kinds: Sequence[AttentionKind]) -> Understood:
    """By the first kind that knows it. Raises NotUnderstood, with the reason of the first kind that has one."""
    reasons = []
    for kind in kinds:
        try:
            found = kind.understand(layer, record)
        except NotUnderstood as reason:
            reasons.append(str(reason))  # an error kept here would keep this frame, and with it the model
        else:
            if found is not None:
                return found
    raise NotUnderstood(reasons[0] if reasons else "its attention is of no kind that is known")
