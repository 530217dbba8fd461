"""Queries and keys of tokens, normed per head and rotated by where each token stands (Su et al., 2021), in one pass."""

from functools import partial

import torch

from accel_kernels.attention.paged.paged_attention import rotated
from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import Norm
from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(q, k, cos, sin, *, interleaved=False, parts=1, q_norm=None, k_norm=None):
    """q: (T, heads, D); k: (T, kv heads, D); any strides, the last 1. Returns both, contiguous, rounded once.

    cos, sin: (T, R / 2), of the first R channels of each head, which turn in pairs: first and second half, or next to
    each other where `interleaved`; or the halves of each of so many equal parts. q_norm, k_norm: RMSNorms of a head
    before that, or None.
    """
    found = []
    for t, norm in ((q, q_norm), (k, k_norm)):
        wide = t if norm is None else norms.reference(t.to(torch.promote_types(t.dtype, torch.float32)), norm)
        found.append(rotated(wide[None], cos[None], sin[None], interleaved, parts)[0].to(t.dtype).contiguous())
    return tuple(found)


def supports(q, k, cos, sin, *, interleaved=False, parts=1, q_norm=None, k_norm=None) -> str | None:
    if q.dim() != 3 or k.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]) or q.numel() == 0:
        return f"queries {tuple(q.shape)}, keys {tuple(k.shape)}"
    if q.shape[2] > 512 or q.dtype != k.dtype or q.stride(2) != 1 or k.stride(2) != 1:
        return f"{q.shape[2]} channels of {q.dtype} and {k.dtype}, or not next to each other"
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.shape[:-1] != q.shape[:1]:
        return f"cosines {tuple(cos.shape)}, sines {tuple(sin.shape)}"
    if 2 * cos.shape[-1] > q.shape[2]:
        return f"{2 * cos.shape[-1]} channels turn, of {q.shape[2]}"
    if cos.shape[-1] % parts or (interleaved and parts > 1):
        return f"{parts} parts of {2 * cos.shape[-1]} channels"
    for norm in (q_norm, k_norm):
        if norm is not None and (norm.centered or norm.bias is not None or norm.weight is None):
            return "a norm with a mean or a bias, or without a weight"
    weights = (norm.weight for norm in (q_norm, k_norm) if norm is not None)
    return dtype_reason(q, k, cos, sin, *weights)


@random_cases
def _case(rand, tokens, heads, kv_heads, dim, *, pairs=None, normed=False, **more):
    qkv = rand(tokens, (heads + 2 * kv_heads) * dim)
    q, k, _ = (t.unflatten(-1, (-1, dim)) for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    angles = rand(tokens, pairs or dim // 2, dtype=torch.float32)
    if normed:
        more["q_norm"], more["k_norm"] = (Norm(rand(dim), None, 1e-6) for _ in range(2))
    return (q, k, angles.cos(), angles.sin()), more


_small = partial(_case, small=True)
CASES = (
    _small("halves", 5, 3, 1, 32),
    _small("part", 7, 2, 2, 24, pairs=5),
    _small("two-parts", 4, 3, 2, 24, pairs=10, parts=2, normed=True),
    _small("interleaved", 3, 2, 1, 16, interleaved=True),
    _small("normed", 4, 5, 2, 20, normed=True),
    _case("modernbert", 16384, 12, 12, 64),
    _case("qwen3-embedding", 4096, 16, 8, 128, normed=True),
    _case("gemma4-pictures", 4096, 12, 12, 64, parts=2, normed=True),
)

rotated_heads = make_op("rotated_heads", reference, supports, CASES)
