"""Attention over a store, prefill and decode: a program a block of (token, head of the group) and a share of the keys.

The heads that share a key head are rows of one product, so keys are read once a group. For few queries the keys are cut
in several shares (split-KV, "flash decoding", Dao et al. 2023); who finishes last puts the shares together.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.decode_triton import decode, decodes
from accel_kernels.attention.paged.kv8_decode_triton import decodes_codes, kv8_decode
from accel_kernels.attention.paged.kv_quantization_triton import code_of
from accel_kernels.attention.paged.online_softmax_triton import (
    attention_block,
    before_keys,
    finish,
    in_base_2,
    load_block,
)
from accel_kernels.attention.paged.rotary_store_triton import rotary_store
from accel_kernels.attention.paged.split_kv import (
    MOST_SPLITS,
    combined_rows,
    scratch,
    split_count,
    tile_of,
    upcast,
)
from accel_kernels.attention.paged.store_triton import padding_mask_of, store_of
from accel_kernels.attention.prefill_attention import PromptAttention
from accel_kernels.dependent_launch_triton import programmatic
from accel_kernels.warmup import launch

# Tokens of a prompt in a graph that stay with our attention: up to here it takes at most 2 us a layer longer on an H200
# than cuDNN's (benchmarks/prompt_attention.py), which takes the host 30 to 70 ms a length.
SHORT = 256


@triton.jit(do_not_specialize=("layer", "new", "window", "splits"))
def paged_attention_kernel(
    q_ptr, o_ptr, part_ptr, stat_ptr, ticket_ptr, sink_ptr, slope_ptr, where_ptr,
    layer, new, heads, kv_heads, scale, window, softcap, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, HAS_PADDING_MASK: tl.constexpr, STORE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MOST_SPLITS: tl.constexpr, COMBINE: tl.constexpr, SPLIT: tl.constexpr, CODE: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    element = q_ptr.dtype.element_ty
    stored_as: tl.constexpr = element if CODE is None else CODE
    tile = tl.program_id(0)
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    g = (tl.program_id(1) % kv_heads).to(tl.int64)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    store = store_of(where_ptr, layer, b, g, DIM, STORE_BLOCK, stored_as, None)
    valid_ptr = None
    if HAS_PADDING_MASK:
        valid_ptr = padding_mask_of(where_ptr, b, STORE_BLOCK)
    stored = store.length
    m_idx = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    token, head = m_idx // GROUP, g * GROUP + m_idx % GROUP
    m_mask = token < new
    at = stored + token
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = ((b * new + token) * heads + head)[:, None] * DIM + d_idx[None, :]
    q = tl.load(q_ptr + place, mask=m_mask[:, None] & d_mask[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    # The blocks of keys that some query of this tile sees, and this program's share of them.
    end = stored + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, new - 1) + 1
    first = 0
    if window is not None:
        first = tl.maximum(0, stored + (tile * BLOCK_M) // GROUP + 1 - window) // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N)
    share = blocks - first
    if SPLIT:
        share = tl.cdiv(share, splits)
    active = tl.cdiv(blocks - first, share)
    start = first + split * share
    stop = tl.minimum(start + share, blocks)
    slope = None
    if slope_ptr is not None:
        slope = in_base_2(slope_ptr, head, m_mask)
    row_max, row_sum = before_keys(sink_ptr, head, m_mask, split, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    odd = 0.0  # see `attention_block`
    for i in range(start, stop):
        n_idx = i * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < end
        k, v, k_scale, v_scale = load_block(store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, CODE, None)
        row_max, row_sum, acc, odd = attention_block(
            q, k, v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, scale, window, softcap, slope,
            valid_ptr, CODE, None, UPCAST,
        )  # fmt: skip
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    finish(
        acc, row_max, row_sum, o_ptr, part_ptr, stat_ptr, ticket_ptr, unit, split, active, tile * BLOCK_M, new, b, g,
        heads, m_mask, GROUP, DIM, BLOCK_M, BLOCK_D, MOST_SPLITS, COMBINE, SPLIT,
    )  # fmt: skip


def paged_attention(
    q, k, v, kv, scale, *, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None, window=None, softcap=None,
    sinks=None, slopes=None, dense=None,
):  # fmt: skip
    """Same arguments and result as the reference; head dimension up to 256."""
    if decodes(q, cos, interleaved, dim=q.shape[-1]):
        return (kv8_decode if decodes_codes(q, kv) else decode)(
            q, k, v, kv, scale, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, window=window, softcap=softcap,
            sinks=sinks, slopes=slopes,
        )  # fmt: skip
    rows, new, heads, dim = q.shape
    kv_heads = k.shape[2]
    extras = (kv.padding_mask, softcap, sinks, slopes)
    plain = all(e is None for e in extras) and (window is None or window >= new)
    torchs = new > 1 if not kv.by_address else new > SHORT and dim % 8 == 0  # of other sizes it keeps all scores
    if kv.is_prefill and plain and q.is_cuda and torchs:
        return _fresh(q, k, v, kv, scale, dense or PromptAttention(), cos, sin, interleaved, q_norm, k_norm)
    q = rotary_store(q, k, v, kv, cos, sin, interleaved, q_norm, k_norm)
    group = heads // kv_heads
    tile = tile_of(new * group, kv.block, dim, q.dtype)
    tiles = triton.cdiv(new * group, tile.queries)
    units = rows * kv_heads * tiles
    # A prompt in a graph has few keys to a query, and room for shares would stay with the graph.
    splits = 1 if kv.is_prefill and kv.by_address else split_count(units, q.device)
    out = torch.empty((rows, new, heads * dim), device=q.device, dtype=q.dtype)
    pdl = programmatic(q.device)
    launch(
        paged_attention_kernel, (tiles, rows * kv_heads, splits),
        q, out, *scratch(units, splits, tile, q.device, kv.split_counters), sinks, slopes, kv.metadata,
        kv.layer, new, heads, kv_heads, float(scale), window, None if softcap is None else float(softcap), splits,
        GROUP=group, DIM=dim, HAS_PADDING_MASK=kv.padding_mask is not None, STORE_BLOCK=kv.block, BLOCK_M=tile.queries,
        BLOCK_N=tile.keys, BLOCK_D=tile.channels, MOST_SPLITS=MOST_SPLITS,
        COMBINE=combined_rows(group * new), SPLIT=splits > 1, CODE=code_of(kv.key_scales, kv.keys),
        UPCAST=upcast(q.dtype), PDL=bool(pdl), num_warps=tile.warps, num_stages=tile.stages, **pdl,
    )  # fmt: skip
    return out


def _fresh(q, k, v, kv, scale: float, dense, *turning):
    """A prompt without past: torch's own causal attention, over the keys as they lie in the store or are put there.

    A graph knows no store; and the rounded ones torch cannot read.
    """
    rows, new = q.shape[:2]
    if kv.key_scales is None and not kv.by_address:
        q = rotary_store(q, k, v, kv, *turning)
        keys, values = (t.view(rows, -1, *t.shape[2:])[:, :new] for t in (kv.keys, kv.values))
    else:
        q, keys, values = rotary_store(q, k, v, kv, *turning, shown=True)
    out = dense(*(t.transpose(1, 2) for t in (q, keys, values)), scale, kv.layer == 0, again=kv.by_address)
    return out.transpose(1, 2).reshape(rows, new, -1)
