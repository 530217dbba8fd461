"""Queries and keys normed and rotated: a program takes one token's block of heads of one kind."""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.rotary_store_triton import angle_of, apply_rope, mates, norms_of_heads
from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

MOST_NUMBERS = 2048  # to a program


@triton.jit
def rotated_heads_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_norm, k_norm, q_step, k_step, angle_step, angle_rise,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, DIM: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    mate, sign, pair = mates(d_idx, PAIRS, INTERLEAVED, PARTS)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if PDL:
        tl.extra.cuda.gdc_wait()
    cos, sin = angle_of(cos_ptr, sin_ptr, token * angle_step + pair * angle_rise, d_idx, PAIRS)
    mask = (h < HEADS)[:, None] & d_mask[None, :]
    heads_ptr = q_ptr + token * q_step + h[:, None] * Q_HEAD
    q = apply_rope(heads_ptr, q_norm, token, mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
    place = (token * HEADS + h[:, None]) * DIM + d_idx[None, :]
    tl.store(q_out_ptr + place, q.to(q_out_ptr.dtype.element_ty), mask=mask)
    mask = (h < KV_HEADS)[:, None] & d_mask[None, :]
    heads_ptr = k_ptr + token * k_step + h[:, None] * K_HEAD
    k = apply_rope(heads_ptr, k_norm, token, mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
    place = (token * KV_HEADS + h[:, None]) * DIM + d_idx[None, :]
    tl.store(k_out_ptr + place, k.to(k_out_ptr.dtype.element_ty), mask=mask)


def rotated_heads(q, k, cos, sin, *, interleaved=False, parts=1, q_norm=None, k_norm=None):
    """Same arguments and result as the reference; see `supports`."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    out = [torch.empty(t.shape, device=t.device, dtype=t.dtype) for t in (q, k)]
    block_d = power_of_two(dim)
    most = max(heads, kv_heads)
    block_h = min(power_of_two(most), max(1, MOST_NUMBERS // block_d))
    launch(
        rotated_heads_kernel, (tokens, cdiv(most, block_h)),
        q, k, *out, cos, sin, *norms_of_heads(q_norm, k_norm, False, None), q.stride(0), k.stride(0), *cos.stride(),
        HEADS=heads, KV_HEADS=kv_heads, Q_HEAD=q.stride(1), K_HEAD=k.stride(1), DIM=dim, PAIRS=cos.shape[-1],
        INTERLEAVED=interleaved, PARTS=parts, BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4, **programmatic(q.device),
    )  # fmt: skip
    return tuple(out)
