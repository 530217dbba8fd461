"""Attention as two matrix products with a softmax between: for wide heads, the VAE's 512 for one.

A flash kernel keeps an accumulator of queries x head dimension in registers; at 512 only 64 queries fit and the tensor
cores starve. Here blocks of queries give fp32 scores, as exact as a flash kernel's, which pass through memory once.
"""

from typing import Any

import torch

from accel_kernels.elementwise.softmax import softmax
from accel_kernels.op import FLOATS

SCORES = 2**25  # at a time: 128 MiB in fp32


def refuses(q, k, v) -> str | None:
    """Why these tensors cannot be taken, or None."""
    if not q.is_cuda:
        return f"runs on CUDA, not on {q.device.type}"
    if q.dtype not in FLOATS:
        return f"dtype {q.dtype} is not float16, bfloat16 or float32"
    return None


def matmul_attention(q, k, v, scale=None):
    """q: (B, H, Sq, D); k, v: (B, H, Sk, D), fp16, bf16 or fp32. Returns (B, H, Sq, D), laid out as (B, Sq, H, D)."""
    batch, heads, length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out = torch.empty((batch, length, heads, dim), device=q.device, dtype=q.dtype).transpose(1, 2)
    exact: dict[str, Any] = {} if q.dtype == torch.float32 else {"out_dtype": torch.float32}
    step = max(1, min(length, SCORES // k.shape[2]))
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h].t(), v[b, h]
            for first in range(0, length, step):
                rows = slice(first, min(first + step, length))
                scores = torch.mm(q[b, h, rows], keys, **exact)
                out[b, h, rows] = softmax(scores, scale, q.dtype) @ values
    return out
