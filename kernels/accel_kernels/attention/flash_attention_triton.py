"""Flash attention forward, no mask: one program a block of queries, online softmax in base 2, fp32 accumulators."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.device import Feature, has, multiprocessors, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

LOG2E = 1.4426950408889634
IN_BASE_2 = tl.constexpr(LOG2E)


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
WIDE_IN_REGISTERS = Tile(16, 32, 8, 1)  # dimension 512, of which more queries spill thousands of bytes, as compiled
FP32_TILE = Tile(32, 32, 4, 1)


@triton.jit
def _read(place, n_mask, d_mask, TAIL: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr):
    if TAIL:
        x = tl.load(place, mask=n_mask & d_mask, other=0.0)
    elif EVEN:
        x = tl.load(place)
    else:
        x = tl.load(place, mask=d_mask, other=0.0)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def attend(
    q, q_rest, k_ptr, v_ptr, stride_ks, stride_vs, n, k_length, at, row_max, row_sum, acc, rest, scale,
    left, right, bias_ptr, reach, slope, places_ptr, query_rows, by_key_ptr, key_step,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, UPCAST: tl.constexpr, ALIKE: tl.constexpr = False,
):  # fmt: skip
    """One block of keys: scores, running maximum and sum, accumulated values. scale: positive, of scores in base 2.

    q_rest, rest: of the channels behind those of q and acc, or q_rest is None. left, right, bias_ptr, slope,
    places_ptr: None where there is no such thing, see `packed_attention`; slope in base 2. query_rows: (BLOCK_M,),
    where rows of its `by_query` begin. TAIL: some keys are not there or not seen. ALIKE: to queries behind the keys all
    are alike.
    """
    n_idx = n + tl.arange(0, BLOCK_N)
    n_mask = n_idx < k_length
    d_idx = tl.arange(0, q.shape[1])
    d_mask = d_idx < DIM
    EVEN: tl.constexpr = q.shape[1] <= DIM
    k_rows, v_rows = k_ptr + n_idx[None, :] * stride_ks, v_ptr + n_idx[:, None] * stride_vs
    k = _read(k_rows + d_idx[:, None], n_mask[None, :], d_mask[:, None], TAIL, EVEN, UPCAST)
    scores = tl.dot(q, k, input_precision="ieee")
    if q_rest is not None:
        r_idx = q.shape[1] + tl.arange(0, q_rest.shape[1])
        r_mask = r_idx < DIM
        EVEN_REST: tl.constexpr = q.shape[1] + q_rest.shape[1] == DIM
        k = _read(k_rows + r_idx[:, None], n_mask[None, :], r_mask[:, None], TAIL, EVEN_REST, UPCAST)
        scores = tl.dot(q_rest, k, scores, input_precision="ieee")
    v = _read(v_rows + d_idx[None, :], n_mask[:, None], d_mask[None, :], TAIL, EVEN, UPCAST)
    if places_ptr is not None:
        place = tl.minimum(tl.maximum(n_idx[None, :] - at[:, None], -reach), reach) + reach
        column = tl.load(places_ptr + place)
        scores += tl.load(query_rows[:, None] + column).to(tl.float32)
        key_rows = by_key_ptr + n_idx[None, :] * key_step
        scores += tl.load(key_rows + column, mask=n_mask[None, :], other=0.0).to(tl.float32)
    if (bias_ptr is not None) or (slope is not None):
        scores *= scale
        scale = 1.0
        distance = n_idx[None, :] - at[:, None]
        if bias_ptr is not None:
            place = tl.minimum(tl.maximum(distance, -reach), reach) + reach
            scores += tl.load(bias_ptr + place).to(tl.float32) * IN_BASE_2
        if slope is not None:
            scores -= tl.abs(distance) * slope
    if ALIKE:
        scores = tl.where((at < k_length)[:, None], scores, 0.0)
    if TAIL:
        seen = n_mask[None, :]
        if left is not None:
            seen &= n_idx[None, :] >= at[:, None] - left
        if right is not None:
            seen &= n_idx[None, :] <= at[:, None] + right
        scores = tl.where(seen, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    top = new_max
    if TAIL:
        top = tl.where(new_max == -float("inf"), 0.0, new_max)  # nothing seen yet: keep infinities apart
    p = tl.exp2(scores * scale - top[:, None])
    shrink = tl.exp2(row_max - top)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
    if q_rest is not None:
        v = _read(v_rows + r_idx[None, :], n_mask[:, None], r_mask[None, :], TAIL, EVEN_REST, UPCAST)
        rest = tl.dot(p, v, rest * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc, rest


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
    rest = 0.0
    whole = k_length // BLOCK_N * BLOCK_N
    for n in range(0, whole, BLOCK_N):
        row_max, row_sum, acc, rest = attend(
            q, None, k_ptr, v_ptr, stride_ks, stride_vs, n, k_length, m_idx, row_max, row_sum, acc, rest, scale,
            None, None, None, 0, None, None, None, None, 0, HEAD_DIM, BLOCK_N, False, UPCAST,
        )  # fmt: skip
    if whole < k_length:
        row_max, row_sum, acc, rest = attend(
            q, None, k_ptr, v_ptr, stride_ks, stride_vs, whole, k_length, m_idx, row_max, row_sum, acc, rest, scale,
            None, None, None, 0, None, None, None, None, 0, HEAD_DIM, BLOCK_N, True, UPCAST,
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
        if not has(q.device, Feature.SHARED_OPERANDS):
            return WIDE_IN_REGISTERS
        blocks = batch * heads * cdiv(q_length, TILES[512].queries)
        return WIDE_FEW_QUERIES if blocks < multiprocessors(q.device) else TILES[512]
    return FEW_KEYS if k_length <= 128 else TILES[block_d]
