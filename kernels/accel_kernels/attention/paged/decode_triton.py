"""One new token a row, in one launch: rotate, store, and attend to everything stored.

The first block of keys and values is on its way before the kernel in front, which makes the queries, has ended. The new
key and value never take the way through memory: the program of the last share adds them by itself, and stores them.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.decode_arguments import decode_arguments
from accel_kernels.attention.paged.kv_quantization_triton import fitted, kv_dtype_of, packing, rounded
from accel_kernels.attention.paged.online_softmax_triton import (
    add_token,
    attention_block,
    before_keys,
    finish,
    in_base_2,
    load_block,
)
from accel_kernels.attention.paged.rotary_store_triton import angle_of, apply_rope, mates
from accel_kernels.attention.paged.split_kv import (
    KV8_BLOCKS,
    KV8_FILL,
    KV8_REGISTERS,
    MOST_SPLITS,
    combined_rows,
    scratch_of,
    split_count,
    tile_of,
)
from accel_kernels.attention.paged.store_triton import padding_mask_of, share_of, store_of
from accel_kernels.device import programmatic, upcast
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch


@triton.jit(do_not_specialize=("layer", "window", "splits", "few_splits"))
def decode_kernel(
    q, k, v, o_ptr, angles, q_norm, k_norm, scratch, sinks_ptr, slopes_ptr, metadata_ptr,
    ragged, layer, heads, kv_heads, scale, window, softcap, splits, few_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    HAS_PADDING_MASK: tl.constexpr, SPLIT: tl.constexpr, STORE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr, KV_DTYPE: tl.constexpr, PACKED: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    element = q.data.dtype.element_ty
    stored_as: tl.constexpr = element if KV_DTYPE is None else KV_DTYPE
    b = (tl.program_id(0) // kv_heads).to(tl.int64)
    g = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if ragged is not None:
        if b >= tl.load(ragged.counts):  # no sequence; what comes out is zeros
            if PDL:
                tl.extra.cuda.gdc_wait()
            if split == 0:
                m_idx, d_idx = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
                place = (b * heads + g * GROUP + m_idx)[:, None] * DIM + d_idx[None, :]
                zeros = tl.zeros((BLOCK_M, BLOCK_D), o_ptr.dtype.element_ty)
                tl.store(o_ptr + place, zeros, mask=(m_idx < GROUP)[:, None] & (d_idx < DIM)[None, :])
            return
    store = store_of(metadata_ptr, ragged, layer, b, g, DIM, STORE_BLOCK, stored_as, PACKED)
    padding_mask_ptr = None
    if HAS_PADDING_MASK:
        padding_mask_ptr = padding_mask_of(metadata_ptr, b, STORE_BLOCK)
    stored = store.length
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    blocks, start, stop, active = share_of(stored, window, split, splits, few_splits, SPLIT, BLOCK_N, LEAST)
    n_idx = tl.minimum(start, tl.maximum(blocks - 1, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < tl.where(start < stop, stored, 0)
    block_k, block_v, k_scale, v_scale = load_block(
        store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, KV_DTYPE, PACKED
    )
    mate, sign = mates(d_idx, PAIRS)
    m_idx = tl.arange(0, BLOCK_M)
    m_mask = m_idx < GROUP
    head = g * GROUP + m_idx
    slope = None
    if slopes_ptr is not None:
        slope = in_base_2(slopes_ptr, head, m_mask)
    row_max, row_sum = before_keys(sinks_ptr, head, m_mask, split, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D if PACKED is None else BLOCK_D // 2), tl.float32)
    odd = 0.0 if PACKED is None else acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    cos, sin = angle_of(angles, b, d_idx, d_mask, PAIRS)
    q_heads = q.data + b * q.row + head[:, None] * q.head
    q_mask = m_mask[:, None] & d_mask[None, :]
    query = apply_rope(q_heads, q_norm, q_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS, Q_NORM)
    query = query.to(element)
    if UPCAST:
        query = query.to(tl.float32)
    q_in, q_scale = query, scale
    if PACKED is not None:
        q_in, unit = fitted(query)
        q_scale = (unit * scale)[:, None]
    at = tl.full((BLOCK_M,), 0, tl.int32) + stored
    if start < stop:
        row_max, row_sum, acc, odd = attention_block(
            q_in, block_k, block_v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, q_scale, window,
            softcap, slope, padding_mask_ptr, KV_DTYPE, PACKED, UPCAST,
        )  # fmt: skip
    for i in range(start + 1, stop):
        n_idx = i * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < stored
        block_k, block_v, k_scale, v_scale = load_block(
            store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, KV_DTYPE, PACKED
        )
        row_max, row_sum, acc, odd = attention_block(
            q_in, block_k, block_v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, q_scale, window,
            softcap, slope, padding_mask_ptr, KV_DTYPE, PACKED, UPCAST,
        )  # fmt: skip
    if PACKED is not None:
        acc = tl.join(acc, odd).reshape(BLOCK_M, BLOCK_D)
    if split == active - 1:
        one = tl.arange(0, 1)[:, None]
        new_mask = (one == 0) & d_mask[None, :]
        k_head = k.data + b * k.row + (g + one) * k.head
        k_new = apply_rope(k_head, k_norm, new_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS, K_NORM)
        k_new = k_new.to(element)
        v_new = tl.load(v.data + b * v.row + (g + one) * v.head + d_idx[None, :], mask=new_mask, other=0.0)
        block = tl.load(store.table + stored // STORE_BLOCK).to(tl.int64)
        slot = (block * STORE_BLOCK + stored % STORE_BLOCK) * (kv_heads * DIM)
        if KV_DTYPE is not None:
            k_new, k_new_scale = rounded(k_new.to(tl.float32), KV_DTYPE)
            v_new, v_new_scale = rounded(v_new.to(tl.float32), KV_DTYPE)
            at_scale = block * (kv_heads * STORE_BLOCK) + stored % STORE_BLOCK + tl.arange(0, 1)
            tl.store(store.k_scales + at_scale, k_new_scale)
            tl.store(store.v_scales + at_scale, v_new_scale)
        tl.store(store.k + slot + d_idx[None, :] + one, k_new, mask=new_mask)
        tl.store(store.v + slot + d_idx[None, :] + one, v_new, mask=new_mask)
        if KV_DTYPE is not None:
            k_new = k_new.to(tl.float32) * k_new_scale[:, None]
            v_new = v_new.to(tl.float32) * v_new_scale[:, None]
        row_max, row_sum, acc = add_token(
            query, k_new, v_new, row_max, row_sum, acc, stored, scale, softcap, slope, padding_mask_ptr
        )
    unit = tl.program_id(0).to(tl.int64)
    finish(
        acc, row_max, row_sum, o_ptr, scratch, unit, split, active, 0, 1, b, g, heads, m_mask,
        GROUP, DIM, BLOCK_M, BLOCK_M, BLOCK_D, MOST_SPLITS, COMBINE, SPLIT,
    )  # fmt: skip


def decodes(q, cos, interleaved: bool, dim: int) -> bool:
    """Whether this kernel takes the call: one new token, and all channels turned in halves, or none."""
    return q.shape[1] == 1 and (cos is None or (not interleaved and 2 * cos.shape[-1] == dim))


def decode(q, k, v, kv, scale, out=None, **more):
    """`paged_attention` for one new token a row, or a sequence, see `decodes`. more: as of `decode_arguments`."""
    rows, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    tile = tile_of(group, kv.block, dim, q.dtype)
    tile = tile._replace(queries=max(16, power_of_two(group)))
    packed = packing(kv.key_scales, kv.values, q.dtype)
    few = split_count(rows * kv_heads, q.device)
    splits = few if packed is None else split_count(rows * kv_heads, q.device, KV8_FILL)
    small = tile.queries == 16 and tile.channels <= 128
    registers = {"maxnreg": KV8_REGISTERS} if packed is not None and small else {}
    out = torch.empty((rows, 1, heads * dim), device=q.device, dtype=q.dtype) if out is None else out
    kept = rows * kv_heads * tile.queries * MOST_SPLITS
    scratch = scratch_of(rows * kv_heads, splits, kept, tile.channels, q.device, kv.split_counters)
    arguments, constants = decode_arguments(q, k, v, out, kv, scale, scratch, splits, few, **more)
    launch(
        decode_kernel, (rows * kv_heads, splits), *arguments,
        **constants, STORE_BLOCK=kv.block, BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_D=tile.channels,
        LEAST=None if packed is None else KV8_BLOCKS, MOST_SPLITS=MOST_SPLITS, COMBINE=combined_rows(group),
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), PACKED=packed, UPCAST=upcast(q.dtype), 
        num_warps=tile.warps, num_stages=tile.stages, **programmatic(q.device), **registers,
    )  # fmt: skip
    return out
