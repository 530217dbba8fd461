"""What the attention kernels over a store share: a block of keys, the running softmax, putting shares together.

Scores are kept in base 2. Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; shares as in
flash decoding (Dao et al. 2023): the last program to finish combines them.
"""

import triton
import triton.language as tl

from accel_kernels.attention.flash_attention_triton import IN_BASE_2
from accel_kernels.attention.paged import split_kv
from accel_kernels.attention.paged.gate_triton import times_gate
from accel_kernels.attention.paged.kv_quantization_triton import halves, low_and_high

MOST_SPLITS = tl.constexpr(split_kv.MOST_SPLITS)
FEW_SPLITS = tl.constexpr(split_kv.FEW_SPLITS)  # put together in a quarter of the registers and loads


@triton.jit
def load_block(
    store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM: tl.constexpr, STORE_BLOCK: tl.constexpr, KV_DTYPE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Keys (D, N) and values (N, D) of the tokens n_idx, which lie in one block of the store, and their scales.

    PACKED: values as int16s of two channels each, (N, D / 2); shared memory turns those around for a product, no bytes.
    """
    start = tl.min(n_idx, axis=0)
    block = tl.load(store.table + start // STORE_BLOCK).to(tl.int64)
    k_scale = 1.0
    v_scale = 1.0
    if PACKED is None:
        slot = (block * STORE_BLOCK + n_idx % STORE_BLOCK) * (kv_heads * DIM)
        k = tl.load(store.k + slot[None, :] + d_idx[:, None], mask=n_mask[None, :] & d_mask[:, None], other=0.0)
        v = tl.load(store.read_v + slot[:, None] + d_idx[None, :], mask=n_mask[:, None] & d_mask[None, :], other=0.0)
        if KV_DTYPE is not None:
            scale = block * (kv_heads * STORE_BLOCK) + n_idx % STORE_BLOCK
            k_scale = tl.load(store.k_scales + scale, mask=n_mask, other=0.0)
            v_scale = tl.load(store.v_scales + scale, mask=n_mask, other=0.0)
    else:
        # One address of 64 bits, offsets of 32 that are the same for every block: there is little time between loads.
        in_block = tl.arange(0, n_idx.shape[0])
        if n_idx.shape[0] != STORE_BLOCK:
            in_block += start % STORE_BLOCK
        first = block * STORE_BLOCK * kv_heads
        pairs = tl.arange(0, d_idx.shape[0] // 2)
        k_ptr = store.k + first * DIM
        v_ptr = store.read_v + first * (DIM // 2)
        k_place = (in_block * (kv_heads * DIM))[None, :] + d_idx[:, None]
        v_place = (in_block * (kv_heads * (DIM // 2)))[:, None] + pairs[None, :]
        k = tl.load(k_ptr + k_place, mask=n_mask[None, :] & d_mask[:, None], other=0.0)
        v = tl.load(v_ptr + v_place, mask=n_mask[:, None] & (pairs < DIM // 2)[None, :], other=0)
        k_scale = tl.load(store.k_scales + first + in_block, mask=n_mask, other=0.0)
        v_scale = tl.load(store.v_scales + first + in_block, mask=n_mask, other=0.0)
    return k, v, k_scale, v_scale


@triton.jit
def capped(scores, softcap):
    """Scores in base 2, after softcap * tanh(scores / softcap) where there is one."""
    if softcap is not None:
        scores = softcap * _tanh(scores / softcap)
    return scores * IN_BASE_2


@triton.jit
def _tanh(x):
    """As exact as fp32 is: near 0, where 1 - 2 / (e^2x + 1) has few digits left, the polynomial of Cephes (tanhf)."""
    z = x * x
    near = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            - 3.33332819422e-1) * z * x + x  # fmt: skip
    return tl.where(tl.abs(x) < 0.625, near, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


@triton.jit
def in_base_2(ptr, head, mask):
    """Sinks or slopes of these heads."""
    return tl.load(ptr + head, mask=mask, other=0.0).to(tl.float32) * IN_BASE_2


@triton.jit
def added_at(slope, place, mask):
    """What is added to scores in base 2 at a place: slopes times it, or the numbers that stand there."""
    if slope.dtype.is_ptr():
        return tl.load(slope + place, mask=mask, other=0.0).to(tl.float32) * IN_BASE_2
    else:
        return slope * place


@triton.jit
def before_keys(sinks_ptr, head, m_mask, split, BLOCK_M: tl.constexpr):
    """The running maximum and sum before any key: of the sinks in the first share, if there are sinks."""
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:
        if split == 0:
            row_max = in_base_2(sinks_ptr, head, m_mask)
            row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    return row_max, row_sum


@triton.jit
def attention_block(
    q, k, v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, scale, window, softcap, slope,
    padding_mask_ptr, KV_DTYPE: tl.constexpr, PACKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running maximum, sum and weighted values; queries stand at positions `at`.

    window, softcap, slope, padding_mask_ptr: None where there is no such thing. slope: see `added_at`.

    Codes of 8 bits are exact in q's dtype. Their scales are no part of the products: that of a key multiplies its
    column of the scores, that of a value the weights it gets. PACKED: q is fp16, acc are the even channels and odd
    the others.
    """
    if PACKED is not None:
        k = halves(k, KV_DTYPE, PACKED)
        v, v_odd = low_and_high(v, KV_DTYPE, PACKED)
    elif UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    elif KV_DTYPE is not None:
        k, v = k.to(q.dtype), v.to(q.dtype)
    products = tl.dot(q, k, input_precision="ieee") * scale
    if KV_DTYPE is not None:
        products *= k_scale[None, :]
    scores = capped(products, softcap)
    if slope is not None:
        scores += added_at(slope[:, None], n_idx[None, :], n_mask[None, :])
    seen = n_mask[None, :] & (n_idx[None, :] <= at[:, None])
    if window is not None:
        seen &= n_idx[None, :] > at[:, None] - window
    if padding_mask_ptr is not None:
        seen &= (tl.load(padding_mask_ptr + n_idx, mask=n_mask, other=0) != 0)[None, :]
    scores = tl.where(seen, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    top = tl.where(new_max == -float("inf"), 0.0, new_max)  # nothing seen yet: keep infinities apart
    p = tl.exp2(scores - top[:, None])
    shrink = tl.exp2(row_max - top)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    if KV_DTYPE is None:
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    elif q.dtype == tl.float16:  # whose range small scales would leave: those of a block are taken by the largest
        top_scale = tl.max(v_scale, axis=0)
        p *= (v_scale * (1.0 / tl.where(top_scale == 0.0, 1.0, top_scale)))[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee") * top_scale
        if PACKED is not None:
            odd = odd * shrink[:, None] + tl.dot(p.to(v.dtype), v_odd, input_precision="ieee") * top_scale
    else:
        p *= v_scale[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_max, row_sum, acc, odd


@triton.jit
def add_token(query, k, v, row_max, row_sum, acc, at, scale, softcap, slope, padding_mask_ptr):
    """The one key and value of position `at`, (1, D) each, as `attention_block` adds a block."""
    score = tl.sum(query.to(tl.float32) * k.to(tl.float32), axis=1) * scale
    score = capped(score, softcap)
    if slope is not None:
        score += added_at(slope, at, True)
    if padding_mask_ptr is not None:
        score = tl.where(tl.load(padding_mask_ptr + at) != 0, score, -float("inf"))
    new_max = tl.maximum(row_max, score)
    top = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(score - top)
    shrink = tl.exp2(row_max - top)
    return new_max, row_sum * shrink + p, acc * shrink[:, None] + p[:, None] * v.to(tl.float32)


@triton.jit
def finish(
    acc, row_max, row_sum, o_ptr, gate, scratch, unit, split, active, m_first, new, token, g, heads,
    m_mask, GROUP: tl.constexpr, DIM: tl.constexpr, USED: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """Writes the output of a tile of queries: rows m are token m // GROUP, head m % GROUP of the group.

    token: the first of the row or sequence. USED: rows of the tile that count. gate: an `OutputGate`, or None.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[1]
    element: tl.constexpr = o_ptr.dtype.element_ty
    d_idx = tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_M)
    m_idx = m_first + rows
    place = ((token + m_idx // GROUP) * heads + g * GROUP + m_idx % GROUP)[:, None] * DIM + d_idx[None, :]
    mask = m_mask[:, None] & (d_idx < DIM)[None, :]
    if (scratch.sums is None) or (active <= 1):
        if split == 0:
            y = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
            y = times_gate(y, gate, token + m_idx // GROUP, g * GROUP + m_idx % GROUP, d_idx, mask, element)
            tl.store(o_ptr + place, y.to(element), mask=mask)
    elif split < active:
        mine = (unit * BLOCK_M + rows) * MOST_SPLITS + split
        tl.store(scratch.sums + mine[:, None] * BLOCK_D + d_idx[None, :], acc, mask=m_mask[:, None])
        tl.store(scratch.stats + mine * 2, row_max, mask=m_mask)
        tl.store(scratch.stats + mine * 2 + 1, row_sum, mask=m_mask)
        tl.debug_barrier()
        taken = tl.atomic_add(scratch.split_counters + unit, 1, sem="acq_rel")
        if taken == active - 1:
            tl.atomic_xchg(scratch.split_counters + unit, 0)
            if active <= FEW_SPLITS:
                _combine(o_ptr, gate, scratch, unit, active, m_first, new, token, g, heads, GROUP, DIM, USED, COMBINE,
                         FEW_SPLITS, BLOCK_M, BLOCK_D)  # fmt: skip
            else:
                _combine(o_ptr, gate, scratch, unit, active, m_first, new, token, g, heads, GROUP, DIM, USED, COMBINE,
                         MOST_SPLITS, BLOCK_M, BLOCK_D)  # fmt: skip


@triton.jit
def _combine(
    o_ptr, gate, scratch, unit, active, m_first, new, token, g, heads, GROUP: tl.constexpr, DIM: tl.constexpr,
    USED: tl.constexpr, COMBINE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Puts the shares of a tile of queries together, of which there are at most SPLITS."""
    element: tl.constexpr = o_ptr.dtype.element_ty
    d_idx = tl.arange(0, BLOCK_D)
    s_idx = tl.arange(0, SPLITS)
    c_idx = tl.arange(0, COMBINE)
    for first in range(0, tl.minimum(USED, new * GROUP - m_first), COMBINE):
        row = first + c_idx
        m = m_first + row
        theirs = (unit * BLOCK_M + row)[:, None] * MOST_SPLITS + s_idx[None, :]
        there = (m < new * GROUP)[:, None] & (row < USED)[:, None] & (s_idx < active)[None, :]
        tops = tl.load(scratch.stats + theirs * 2, mask=there, other=-float("inf"))
        sums = tl.load(scratch.stats + theirs * 2 + 1, mask=there, other=0.0)
        parts = tl.load(
            scratch.sums + theirs[:, :, None] * BLOCK_D + d_idx[None, None, :], mask=there[:, :, None], other=0.0
        )
        top = tl.max(tops, axis=1)
        weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top)[:, None])
        total = tl.sum(sums * weights, axis=1)
        y = tl.sum(parts * weights[:, :, None], axis=1) / tl.where(total == 0.0, 1.0, total)[:, None]
        out = ((token + m // GROUP) * heads + g * GROUP + m % GROUP)[:, None] * DIM + d_idx[None, :]
        keep = ((m < new * GROUP) & (row < USED))[:, None] & (d_idx < DIM)[None, :]
        y = times_gate(y, gate, token + m // GROUP, g * GROUP + m % GROUP, d_idx, keep, element)
        tl.store(o_ptr + out, y.to(element), mask=keep)
