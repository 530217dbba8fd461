"""Softmax attention without a mask, softmax(q k^T * scale) v, for any head dimension up to 512.

Tiled with an online softmax (Dao, "FlashAttention-2", 2023). It wins for the few keys of a prompt.
"""

import torch
import torch.nn.functional as F

from accel_kernels.op import dtype_reason, make_op, random_cases


def reference(q, k, v, scale=None):
    """q: (B, H, Sq, D); k, v: (B, H, Sk, D); scale defaults to 1 / sqrt(D). Returns (B, H, Sq, D)."""
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def supports(q, k, v, scale=None) -> str | None:
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4:
        return "not (batch, heads, length, dim) with keys and values of one shape"
    if k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        return f"queries {tuple(q.shape)} against keys {tuple(k.shape)}"
    if 0 in q.shape or 0 in k.shape:
        return "empty"
    if q.shape[3] > (512 if q.dtype != torch.float32 else 64):
        return f"head dimension {q.shape[3]}, too many for {q.dtype}"
    if scale is not None and scale <= 0:
        return "a scale that is not positive"
    if not (q.dtype == k.dtype == v.dtype):
        return "queries, keys and values of several dtypes"
    if any(t.stride(3) != 1 for t in (q, k, v)):
        return "last dimension not contiguous"
    return dtype_reason(q, k, v, products=True)


@random_cases
def _case(rand, b, h, sq, sk, d, packed=False):
    if packed:  # as views of one projection, the way a fused QKV gives them
        qkv = rand(b, sq, 3, h, d)
        return tuple(qkv[:, :, i].transpose(1, 2) for i in range(3)), {}
    return tuple(rand(b, h, s, d) for s in (sq, sk, sk)), {}


CASES = (
    _case("tiny", 1, 2, 16, 16, 16, small=True),
    _case("odd", 2, 1, 37, 77, 40, small=True),
    _case("one-key", 1, 1, 5, 1, 8, small=True),
    _case("packed", 1, 2, 33, 33, 24, packed=True, small=True),
    _case("sd15-cross", 2, 8, 4096, 77, 40),
    _case("sd15-self", 2, 8, 1024, 1024, 80, packed=True),
    _case("vae-512", 1, 1, 4096, 4096, 512, packed=True),
    _case("vae-odd", 2, 1, 1023, 1023, 512),
)

attention = make_op("attention", reference, supports, CASES)
