"""One new token a row, in one launch: rotate, store, and attend to everything stored.

The first block of keys and values is loaded before the kernel in front, which makes the queries, has ended. The new key
and value are added from registers, by the program of the last share, which stores them too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.gate_triton import apply_gate, gate_of
from accel_kernels.attention.paged.kv8.kv8_decode_kernel_triton import BLOCK, HEADS, kv8_decode_kernel
from accel_kernels.attention.paged.kv_quantization_triton import fitted, kv_dtype_of, packing, rounded
from accel_kernels.attention.paged.online_softmax_triton import (
    add_token,
    attention_block,
    before_keys,
    finish,
    in_base_2,
    load_block,
)
from accel_kernels.attention.paged.rotary_store_triton import angle_of, apply_rope, mates, norms_of_heads
from accel_kernels.attention.paged.split_kv import (
    FILL,
    KV8_BLOCKS,
    KV8_FILL,
    KV8_MOST_SPLITS,
    KV8_REGISTERS,
    MOST_SPLITS,
    combined_rows,
    scratch_of,
    split_count,
    tile_of,
)
from accel_kernels.attention.paged.store_triton import padding_mask_of, seen_of_chunk, share_of, store_of
from accel_kernels.device import Feature, has, interpreted, programmatic, upcast
from accel_kernels.sizes import power_of_two
from accel_kernels.warmup import launch

WARPS = 8  # of a program whose heads have 128 channels: its one tile is multiplied and put together sooner


class Heads(NamedTuple):
    """The heads of one new token: (rows, 1, heads, D), and the steps from row to row and from head to head."""

    data: torch.Tensor
    row: int
    head: int


class Angles(NamedTuple):
    """cos and sin of the rotation, or None, and the steps from row to row and from pair to pair of channels."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    row: int = 0
    pair: int = 0


@triton.jit(do_not_specialize=("layer", "window", "splits", "few_splits", "biases"))
def decode_kernel(
    q, k, v, o_ptr, angles, q_norm, k_norm, scratch, sinks_ptr, slopes_ptr, metadata_ptr,
    ragged, gate, biases, layer, heads, kv_heads, scale, window, softcap, splits, few_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_PADDING_MASK: tl.constexpr, LEAST: tl.constexpr, KV_DTYPE: tl.constexpr, STORE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMBINE: tl.constexpr, PACKED: tl.constexpr,
    UPCAST: tl.constexpr, CHUNKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    element = q.data.dtype.element_ty
    SPLIT: tl.constexpr = scratch.sums is not None
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
    if CHUNKED:
        window = seen_of_chunk(stored, window, stored, padding_mask_ptr)
    reach = window
    if k is None:  # the new token is stored already, by a kernel that may not have ended
        stored += 1
        if window is not None:
            reach = window + 1
        if PDL:
            tl.extra.cuda.gdc_wait()
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    blocks, start, stop, active = share_of(stored, reach, split, splits, few_splits, SPLIT, BLOCK_N, LEAST)
    n_idx = tl.minimum(start, tl.maximum(blocks - 1, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n_idx < tl.where(start < stop, stored, 0)
    block_k, block_v, k_scale, v_scale = load_block(
        store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, KV_DTYPE, PACKED
    )
    mate, sign, pair = mates(d_idx, PAIRS, INTERLEAVED)
    m_idx = tl.arange(0, BLOCK_M)
    m_mask = m_idx < GROUP
    head = g * GROUP + m_idx
    slope = None
    if biases is not None:  # of each head, at slopes_ptr
        slope = slopes_ptr + tl.where(m_mask, head, 0) * biases
    elif slopes_ptr is not None:
        slope = in_base_2(slopes_ptr, head, m_mask)
    row_max, row_sum = before_keys(sinks_ptr, head, m_mask, split, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D if PACKED is None else BLOCK_D // 2), tl.float32)
    odd = 0.0 if PACKED is None else acc
    if PDL:
        tl.extra.cuda.gdc_wait()
    cos, sin = angle_of(angles.cos, angles.sin, b * angles.row + pair * angles.pair, d_idx, PAIRS)
    q_heads = q.data + b * q.row + head[:, None] * q.head
    q_mask = m_mask[:, None] & d_mask[None, :]
    query = apply_rope(q_heads, q_norm, b, q_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
    query = query.to(element)
    if UPCAST:
        query = query.to(tl.float32)
    q_in, q_scale = query, scale
    if PACKED is not None:
        q_in, unit = fitted(query)
        q_scale = (unit * scale)[:, None]
    at = tl.full((BLOCK_M,), 0, tl.int32) + store.length
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
    if k is not None and split == active - 1:
        one = tl.arange(0, 1)[:, None]
        new_mask = (one == 0) & d_mask[None, :]
        k_head = k.data + b * k.row + (g + one) * k.head
        k_new = apply_rope(k_head, k_norm, b, new_mask, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
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
        acc, row_max, row_sum, o_ptr, gate, scratch, unit, split, active, 0, 1, b, g, heads, m_mask, GROUP, DIM,
        BLOCK_M, COMBINE,
    )  # fmt: skip


def decodes_kv8(q, cos, kv) -> bool:
    """Whether `kv8_decode_kernel` takes a call."""
    if kv.key_scales is None or interpreted() or not has(q.device, Feature.WIDE_PRODUCTS):
        return False
    heads, dim = q.shape[2:]
    few = heads // kv.keys.shape[2] <= HEADS and (cos is None or 2 * cos.shape[-1] == dim)
    return few and dim in (64, 128) and q.dtype in (torch.float16, torch.bfloat16) and kv.block == BLOCK


def decode(
    q, k, v, kv, scale, out=None, kv8=None, *, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None,
    window=None, softcap=None, sinks=None, slopes=None, gate=None, gate_activation="sigmoid", norms_after=False,
    q_scales=None, chunked=False, bias=None,
):  # fmt: skip
    """`paged_attention` for one new token a row, or a sequence. kv8: whether by `kv8_decode_kernel`; None: where that
    takes it.
    """
    (rows, _, heads, dim), kv_heads = q.shape, kv.keys.shape[2]
    units, group = rows * kv_heads, heads // kv_heads
    kv8 = not chunked and bias is None and decodes_kv8(q, cos, kv) if kv8 is None else kv8
    packed = packing(kv.key_scales, kv.values, q.dtype)
    most = KV8_MOST_SPLITS if kv8 else MOST_SPLITS
    few = split_count(units, q.device, FILL, most)
    splits = few if packed is None else split_count(units, q.device, KV8_FILL, most)
    inside: tuple = ()
    constants = {"LEAST": None if packed is None else KV8_BLOCKS, "KV_DTYPE": kv_dtype_of(kv.key_scales, kv.keys)}
    if kv8:
        kernel, kept, channels, small = kv8_decode_kernel, units * HEADS * splits, dim, True
        meta = {"num_warps": 4}
    else:
        tile = tile_of(group, kv.block, q)
        tile = tile._replace(queries=max(16, power_of_two(group)))
        kernel, kept, channels = decode_kernel, units * tile.queries * most, tile.channels
        small = packed is not None and tile.queries == 16 and channels <= 128
        timed = kv.key_scales is None and q.dtype != torch.float32 and channels == 128 and tile.queries == 16
        warps = WARPS if timed else tile.warps
        meta = {"num_warps": warps, "num_stages": tile.stages}
        inside = gate_of(gate, gate_activation), None if bias is None else bias.shape[1]
        constants |= {
            "STORE_BLOCK": kv.block, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys, "BLOCK_D": channels,
            "COMBINE": combined_rows(group, dim), "PACKED": packed, "UPCAST": upcast(q.dtype), "CHUNKED": chunked,
        }  # fmt: skip
    if small and has(q.device, Feature.WIDE_PRODUCTS):  # without, products take far more registers
        meta["maxnreg"] = KV8_REGISTERS
    out = torch.empty((rows, 1, heads * dim), device=q.device, dtype=q.dtype) if out is None else out
    angles = Angles(None, None)
    if cos is not None:
        angles = Angles(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2))
    given = (None if t is None else Heads(t, t.stride(0), t.stride(2)) for t in (q, k, v))
    launch(
        kernel, (units, splits), *given, out, angles, *norms_of_heads(q_norm, k_norm, norms_after, q_scales),
        scratch_of(units, splits, kept, channels, q.device, kv.split_counters), sinks,
        slopes if bias is None else bias, kv.metadata, None if kv.ragged is None else kv.ragged.pointers(), *inside,
        kv.layer, heads, kv_heads, float(scale), window, None if softcap is None else float(softcap), splits, few,
        GROUP=group, DIM=dim, PAIRS=0 if cos is None else cos.shape[-1], INTERLEAVED=interleaved,
        HAS_PADDING_MASK=kv.padding_mask is not None, **constants, **meta, **programmatic(q.device),
    )  # fmt: skip
    return out if inside else apply_gate(out, gate, gate_activation)
