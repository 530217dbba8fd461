"""Flash attention forward, no mask: one program a block of queries, online softmax in base 2, fp32 accumulators."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import multiprocessors, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Block sizes and launch shape for one padded head dimension."""

    queries: int
    keys: int
    warps: int
    stages: int


# By padded head dimension, as measured on an H200. At 512 the accumulator fills the registers of 8 warps.
TILES = {
    16: Tile(128, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 4, 3),
    128: Tile(128, 64, 8, 3),
    256: Tile(64, 64, 8, 2),
    512: Tile(64, 64, 8, 1),
}
FEW_KEYS = Tile(64, 32, 4, 2)  # up to 128 keys: the prompt of a cross-attention
WIDE_FEW_QUERIES = Tile(32, 64, 4, 2)  # dimension 512, where blocks of 64 queries would leave multiprocessors idle
FP32_TILE = Tile(32, 32, 4, 1)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, stride_ks, stride_vs, n, k_length, d_idx, d_mask, row_max, row_sum, acc, scale,
    BLOCK_N: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """One block of keys: scores, running maximum and sum, accumulated values."""
    n_idx = n + tl.arange(0, BLOCK_N)
    n_mask = n_idx < k_length
    k_place = k_ptr + n_idx[None, :] * stride_ks + d_idx[:, None]
    v_place = v_ptr + n_idx[:, None] * stride_vs + d_idx[None, :]
    if TAIL:
        k = tl.load(k_place, mask=n_mask[None, :] & d_mask[:, None], other=0.0)
        v = tl.load(v_place, mask=n_mask[:, None] & d_mask[None, :], other=0.0)
    elif EVEN_D:
        k = tl.load(k_place)
        v = tl.load(v_place)
    else:
        k = tl.load(k_place, mask=d_mask[:, None], other=0.0)
        v = tl.load(v_place, mask=d_mask[None, :], other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if TAIL:
        scores = tl.where(n_mask[None, :], scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])
    shrink = tl.exp2(row_max - new_max)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=("q_length", "k_length"))
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, heads, q_length, k_length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    m_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < HEAD_DIM
    q_mask = (m_idx < q_length)[:, None] & d_mask[None, :]
    q_place = q_ptr + b * stride_qb + h * stride_qh + m_idx.to(tl.int64)[:, None] * stride_qs + d_idx[None, :]
    q = tl.load(q_place, mask=q_mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    whole = k_length // BLOCK_N * BLOCK_N
    for n in range(0, whole, BLOCK_N):
        row_max, row_sum, acc = _attend(
            q, k_ptr, v_ptr, stride_ks, stride_vs, n, k_length, d_idx, d_mask, row_max, row_sum, acc, scale,
            BLOCK_N, False, UPCAST, HEAD_DIM == BLOCK_D,
        )  # fmt: skip
    if whole < k_length:
        row_max, row_sum, acc = _attend(
            q, k_ptr, v_ptr, stride_ks, stride_vs, whole, k_length, d_idx, d_mask, row_max, row_sum, acc, scale,
            BLOCK_N, True, UPCAST, HEAD_DIM == BLOCK_D,
        )  # fmt: skip
    acc = acc / row_sum[:, None]
    o_place = o_ptr + b * stride_ob + h * stride_oh + m_idx.to(tl.int64)[:, None] * stride_os + d_idx[None, :]
    tl.store(o_place, acc.to(o_ptr.dtype.element_ty), mask=q_mask)


def attention(q, k, v, scale=None):
    """q: (B, H, Sq, D); k, v: (B, H, Sk, D), any strides with the last one 1. Returns (B, H, Sq, D), laid out as
    (B, Sq, H, D) so that merging the heads copies nothing."""
    batch, heads, q_length, dim = q.shape
    out = torch.empty((batch, q_length, heads, dim), device=q.device, dtype=q.dtype).transpose(1, 2)
    scale = dim**-0.5 if scale is None else scale
    block_d = max(16, power_of_two(dim))
    tile = _tile(q, k.shape[2], block_d)
    launch(
        attention_kernel, (cdiv(q_length, tile.queries), batch * heads),
        q, k, v, out, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        heads, q_length, k.shape[2], scale * LOG2E, dim, block_d, tile.queries, tile.keys, upcast(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile(q, k_length: int, block_d: int) -> Tile:
    batch, heads, q_length, _ = q.shape
    if q.dtype == torch.float32:
        return FP32_TILE
    if block_d == 512:
        blocks = batch * heads * cdiv(q_length, TILES[512].queries)
        return WIDE_FEW_QUERIES if blocks < multiprocessors(q.device) else TILES[512]
    return FEW_KEYS if k_length <= 128 else TILES[block_d]
