"""The kinds of attention that fused layers compute, in the order in which they are tried."""

from typing import Any

from accel.llm.analysis import softmax_attention
from accel.llm.analysis.attention_kind import AttentionKind, AttentionSpec
from accel.llm.runtime.softmax_attention import BoundSoftmaxAttention

KINDS: tuple[AttentionKind[Any], ...] = (
    AttentionKind(
        "softmax",
        softmax_attention.SoftmaxSpec,
        softmax_attention.understand,
        BoundSoftmaxAttention,
        softmax_attention.cache_layout,
    ),
)


def attention_kind_of(spec: AttentionSpec) -> AttentionKind[Any]:
    """That which understood it."""
    return next(kind for kind in KINDS if kind.spec is type(spec))
