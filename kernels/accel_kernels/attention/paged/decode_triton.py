"""One new token a row, in one launch: rotate, store, and attend to everything stored.

The first block of keys and values is on its way before the kernel in front, which makes the queries, has ended. The new
key and value never take the way through memory: the program of the last share adds them by itself, and stores them.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.decode_arguments import decode_arguments
from accel_kernels.attention.paged.kv import PADDING_MASK
from accel_kernels.attention.paged.kv_quantization_triton import code_of, packing, power_below, rounded
from accel_kernels.attention.paged.online_softmax_triton import attention_block, capped, finish, load_block
from accel_kernels.attention.paged.rotary_store_triton import (
    AT_COLUMNS,
    AT_LAYERS,
    AT_LENGTH,
    AT_TABLE,
    OF_EACH,
    apply_rope,
    stored_at,
)
from accel_kernels.attention.paged.split_kv import (
    CODES_FILL,
    CODES_REGISTERS,
    KV8_BLOCKS,
    LEAST_BLOCKS,
    MOST_SPLITS,
    combined_rows,
    scratch,
    split_count,
    tile_of,
    upcast,
)
from accel_kernels.dependent_launch_triton import programmatic
from accel_kernels.launch import power_of_two
from accel_kernels.warmup import launch

AT_VALID, CODES_LEAST = tl.constexpr(PADDING_MASK), tl.constexpr(KV8_BLOCKS)


@triton.jit(do_not_specialize=("layer", "window", "splits", "few_splits"))
def decode_kernel(
    q, k, v, o_ptr, angles, q_norm, k_norm, part_ptr, stat_ptr, ticket_ptr, sink_ptr, slope_ptr, where_ptr, layer,
    heads, kv_heads, scale, window, softcap, splits, few_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    HAS_PADDING_MASK: tl.constexpr, SPLIT: tl.constexpr, STORE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr, CODE: tl.constexpr, PACKED: tl.constexpr, UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    element = q.data.dtype.element_ty
    stored_as: tl.constexpr = element if CODE is None else CODE
    b = (tl.program_id(0) // kv_heads).to(tl.int64)
    g = (tl.program_id(0) % kv_heads).to(tl.int64)
    split = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    stored = tl.load(where_ptr + AT_LENGTH).to(tl.int32)
    columns = tl.load(where_ptr + AT_COLUMNS)
    table = stored_at(where_ptr, AT_TABLE, tl.int32) + b * columns
    keys = stored_at(where_ptr, AT_LAYERS + OF_EACH * layer, stored_as) + g * DIM
    new_values = stored_at(where_ptr, AT_LAYERS + OF_EACH * layer + 1, stored_as) + g * DIM
    values = new_values
    if PACKED is not None:
        values = stored_at(where_ptr, AT_LAYERS + OF_EACH * layer + 1, tl.int16) + g * (DIM // 2)
    k_scales = stored_at(where_ptr, AT_LAYERS + OF_EACH * layer + 2, tl.float32) + g * STORE_BLOCK
    v_scales = stored_at(where_ptr, AT_LAYERS + OF_EACH * layer + 3, tl.float32) + g * STORE_BLOCK
    valid_ptr = None
    if HAS_PADDING_MASK:
        valid_ptr = tl.load(where_ptr + AT_VALID).to(tl.pointer_type(tl.int8)) + b * columns * STORE_BLOCK
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    first = 0
    if window is not None:
        first = tl.maximum(0, stored + 1 - window) // BLOCK_N
    blocks = tl.cdiv(stored, BLOCK_N)
    share = tl.maximum(blocks - first, 1)
    if SPLIT:
        few = tl.cdiv(share, few_splits)
        share = tl.maximum(tl.cdiv(share, splits), LEAST)
        if PACKED is not None:
            share = tl.maximum(share, tl.minimum(few, CODES_LEAST))
    active = tl.maximum(1, tl.cdiv(blocks - first, share))
    start = first + split * share
    stop = tl.minimum(start + share, blocks)
    n_idx = tl.minimum(start, tl.maximum(blocks - 1, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < tl.where(start < stop, stored, 0)
    block_k, block_v, k_scale, v_scale = load_block(
        keys, values, k_scales, v_scales, table, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, CODE, PACKED
    )
    # How channels turn together, as in rotary_store; here all of them, or none, in pairs (i, i + half).
    HALF: tl.constexpr = PAIRS if PAIRS > 0 else 1
    mate = tl.where(d_idx < HALF, d_idx + HALF, d_idx - HALF) if PAIRS > 0 else d_idx
    sign = tl.where(d_idx < HALF, -1.0, 1.0)
    m_idx = tl.arange(0, BLOCK_M)
    m_mask = m_idx < GROUP
    head = g * GROUP + m_idx
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    slope = None
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + head, mask=m_mask, other=0.0).to(tl.float32) * 1.4426950408889634
    if sink_ptr is not None:
        if split == 0:
            row_max = tl.load(sink_ptr + head, mask=m_mask, other=0.0).to(tl.float32) * 1.4426950408889634
            row_sum = tl.full((BLOCK_M,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D if PACKED is None else BLOCK_D // 2), tl.float32)
    odd = 0.0 if PACKED is None else acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PAIRS > 0:
        angle = b * angles.row + (d_idx % HALF) * angles.pair
        cos = tl.load(angles.cos + angle, mask=d_mask, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(angles.sin + angle, mask=d_mask, other=0.0).to(tl.float32)[None, :]
    else:
        cos = 1.0
        sin = 0.0
    q_heads = q.data + b * q.row + head[:, None] * q.head
    q_mask = m_mask[:, None] & d_mask[None, :]
    query = apply_rope(q_heads, q_norm, q_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS, Q_NORM)
    query = query.to(element)
    if UPCAST:
        query = query.to(tl.float32)
    q_in, q_scale = query, scale
    if PACKED is not None:
        # By a power of two into the range of fp16, where what a bf16 holds is exact.
        unit = power_below(tl.max(tl.abs(query.to(tl.float32)), axis=1))
        q_in, q_scale = (query.to(tl.float32) / unit[:, None]).to(tl.float16), (unit * scale)[:, None]
    at = tl.full((BLOCK_M,), 0, tl.int32) + stored
    if start < stop:
        row_max, row_sum, acc, odd = attention_block(
            q_in, block_k, block_v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, q_scale, window,
            softcap, slope, valid_ptr, CODE, PACKED, UPCAST,
        )  # fmt: skip
    for i in range(start + 1, stop):
        n_idx = i * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < stored
        block_k, block_v, k_scale, v_scale = load_block(
            keys, values, k_scales, v_scales, table, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, CODE,
            PACKED,
        )  # fmt: skip
        row_max, row_sum, acc, odd = attention_block(
            q_in, block_k, block_v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, q_scale, window,
            softcap, slope, valid_ptr, CODE, PACKED, UPCAST,
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
        block = tl.load(table + stored // STORE_BLOCK).to(tl.int64)
        slot = (block * STORE_BLOCK + stored % STORE_BLOCK) * (kv_heads * DIM)
        if CODE is not None:
            k_new, k_new_scale = rounded(k_new.to(tl.float32), CODE)
            v_new, v_new_scale = rounded(v_new.to(tl.float32), CODE)
            at_scale = block * (kv_heads * STORE_BLOCK) + stored % STORE_BLOCK + tl.arange(0, 1)
            tl.store(k_scales + at_scale, k_new_scale)
            tl.store(v_scales + at_scale, v_new_scale)
        tl.store(keys + slot + d_idx[None, :] + one, k_new, mask=new_mask)
        tl.store(new_values + slot + d_idx[None, :] + one, v_new, mask=new_mask)
        if CODE is not None:
            k_new = k_new.to(tl.float32) * k_new_scale[:, None]
            v_new = v_new.to(tl.float32) * v_new_scale[:, None]
        score = tl.sum(query.to(tl.float32) * k_new.to(tl.float32), axis=1) * scale
        score = capped(score, softcap)
        if slope is not None:
            score += slope * stored
        if HAS_PADDING_MASK:
            score = tl.where(tl.load(valid_ptr + stored) != 0, score, -float("inf"))
        new_max = tl.maximum(row_max, score)
        top = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp2(score - top)
        shrink = tl.exp2(row_max - top)
        row_sum = row_sum * shrink + p
        acc = acc * shrink[:, None] + p[:, None] * v_new.to(tl.float32)
        row_max = new_max
    unit = tl.program_id(0).to(tl.int64)
    finish(
        acc, row_max, row_sum, o_ptr, part_ptr, stat_ptr, ticket_ptr, unit, split, active, 0, 1, b, g, heads, m_mask,
        GROUP, DIM, BLOCK_M, BLOCK_D, MOST_SPLITS, COMBINE, SPLIT,
    )  # fmt: skip


def decodes(q, cos, interleaved: bool, dim: int) -> bool:
    """Whether this kernel takes the call: one new token, and all channels turned in halves, or none."""
    return q.shape[1] == 1 and (cos is None or (not interleaved and 2 * cos.shape[-1] == dim))


def decode(q, k, v, kv, scale, **more):
    """`paged_attention` for one new token a row, see `decodes`. more: as of `decode_arguments`."""
    rows, _, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    tile = tile_of(group, kv.block, dim, q.dtype)
    tile = tile._replace(queries=max(16, power_of_two(group)))
    packed = packing(kv.key_scales, kv.values, q.dtype)
    few = split_count(rows * kv_heads, q.device)
    splits = few if packed is None else split_count(rows * kv_heads, q.device, CODES_FILL)
    small = tile.queries == 16 and tile.channels <= 128
    registers = {"maxnreg": CODES_REGISTERS} if packed is not None and small else {}
    out = torch.empty((rows, 1, heads * dim), device=q.device, dtype=q.dtype)
    pdl = programmatic(q.device)
    room = scratch(rows * kv_heads, splits, tile, q.device, kv.split_counters)
    arguments, constants = decode_arguments(q, k, v, out, kv, scale, room, splits, few, **more)
    launch(
        decode_kernel, (rows * kv_heads, splits), *arguments,
        **constants, STORE_BLOCK=kv.block, BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_D=tile.channels,
        LEAST=LEAST_BLOCKS, MOST_SPLITS=MOST_SPLITS, COMBINE=combined_rows(group),
        CODE=code_of(kv.key_scales, kv.keys), PACKED=packed, UPCAST=upcast(q.dtype), PDL=bool(pdl),
        num_warps=tile.warps, num_stages=tile.stages, **pdl, **registers,
    )  # fmt: skip
    return out
