"""Attention over a store: a program takes a block of (token, head of the group) and a share of the keys.

The heads that share a key head are rows of one product, so keys are read once a group. For few queries the keys are cut
in several shares (split-KV, "flash decoding", Dao et al. 2023), which the last program to finish combines.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.decode_triton import decode
from accel_kernels.attention.paged.gate_triton import apply_gate, gate_of
from accel_kernels.attention.paged.kv_quantization_triton import kv_dtype_of
from accel_kernels.attention.paged.online_softmax_triton import (
    attention_block,
    before_keys,
    finish,
    in_base_2,
    load_block,
)
from accel_kernels.attention.paged.paged_attention import masked_attention
from accel_kernels.attention.paged.rotary_store_triton import rotary_store
from accel_kernels.attention.paged.split_kv import MOST_SPLITS, combined_rows, scratch_of, split_count, tile_of
from accel_kernels.attention.paged.store_triton import padding_mask_of, seen_of_chunk, store_of
from accel_kernels.attention.prefill_attention import PromptAttention
from accel_kernels.device import programmatic, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

# Tokens of a prompt in a graph that stay with our attention: up to here it takes at most 2 us a layer longer on an H200
# than cuDNN's (python -m benchmarks prompt-attention), which takes the host 30 to 70 ms a length.
SHORT = 256
ANGLES = ("cos", "sin")


@triton.jit
def sequence_of_tile(tile, ragged, TOKENS: tl.constexpr, PREFILLS: tl.constexpr, HEADS: tl.constexpr = 1):
    """The sequence that a tile of TOKENS tokens is of, the tile's place in it, its first token, and its new tokens.

    The tiles of sequence i begin at i + starts[i] // TOKENS: that is room for all, and some stay empty. Of sequences in
    use, and behind the decodes where PREFILLS. HEADS: a tile is of TOKENS pairs of a token and one of so many heads.
    """
    low = 0
    if PREFILLS:
        low = tl.load(ragged.counts)
    skipped = low
    first = tl.load(ragged.starts + low)
    high = tl.load(ragged.counts + 1)
    last = high
    while low + 1 < high:
        middle = (low + high) // 2
        begins = middle - skipped + (tl.load(ragged.starts + middle) - first) * HEADS // TOKENS
        if begins <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(ragged.starts + low)
    end = tl.load(ragged.starts + low + 1, mask=low < last, other=0)
    place = tile - (low - skipped + (start - first) * HEADS // TOKENS)
    return low.to(tl.int64), place, start.to(tl.int64), tl.where(low < last, end - start, 0)


@triton.jit(do_not_specialize=("layer", "new", "window", "splits", "skipped"))
def paged_attention_kernel(
    q_ptr, o_ptr, gate, scratch, sinks_ptr, slopes_ptr, metadata_ptr,
    ragged, layer, new, heads, kv_heads, scale, window, softcap, splits, skipped,
    GROUP: tl.constexpr, DIM: tl.constexpr, HAS_PADDING_MASK: tl.constexpr, STORE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMBINE: tl.constexpr, KV_DTYPE: tl.constexpr,
    PREFILLS: tl.constexpr, UPCAST: tl.constexpr, CHUNKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    element = q_ptr.dtype.element_ty
    stored_as: tl.constexpr = element if KV_DTYPE is None else KV_DTYPE
    # Of the rows of a tile; a tile of a sequence begins with all heads of a token.
    USED: tl.constexpr = BLOCK_M if ragged is None else BLOCK_M // GROUP * GROUP
    tile = tl.program_id(0)
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    g = (tl.program_id(1) % kv_heads).to(tl.int64)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_token = b * new
    if ragged is not None:
        b, tile, first_token, new = sequence_of_tile(tile, ragged, USED // GROUP, PREFILLS)
        if tile * (USED // GROUP) >= new:
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
    store = store_of(metadata_ptr, ragged, layer, b, g, DIM, STORE_BLOCK, stored_as, None)
    padding_mask_ptr = None
    if HAS_PADDING_MASK:
        padding_mask_ptr = padding_mask_of(metadata_ptr, b, STORE_BLOCK)
    stored = store.length + skipped
    m_idx = tile * USED + tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    d_mask = d_idx < DIM
    token, head = m_idx // GROUP, g * GROUP + m_idx % GROUP
    m_mask = (token < new) & (tl.arange(0, BLOCK_M) < USED)
    at = stored + token
    if PDL:
        tl.extra.cuda.gdc_wait()
    place = ((first_token + token) * heads + head)[:, None] * DIM + d_idx[None, :]
    q = tl.load(q_ptr + place, mask=m_mask[:, None] & d_mask[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    # The blocks of keys that some query of this tile sees, and this program's share of them.
    end = stored + tl.minimum((tile * USED + USED - 1) // GROUP, new - 1) + 1
    first = 0
    if window is not None:
        begins = stored + (tile * USED) // GROUP
        if CHUNKED:
            first = tl.maximum(0, begins + 1 - seen_of_chunk(begins, window, end, padding_mask_ptr)) // BLOCK_N
            window = seen_of_chunk(at, window, end, padding_mask_ptr)[:, None]
        else:
            first = tl.maximum(0, begins + 1 - window) // BLOCK_N
    blocks = tl.cdiv(end, BLOCK_N)
    share = blocks - first
    if scratch.sums is not None:
        share = tl.cdiv(share, splits)
    active = tl.cdiv(blocks - first, share)
    start = first + split * share
    stop = tl.minimum(start + share, blocks)
    slope = None
    if slopes_ptr is not None:
        slope = in_base_2(slopes_ptr, head, m_mask)
    row_max, row_sum = before_keys(sinks_ptr, head, m_mask, split, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    odd = 0.0  # see `attention_block`
    for i in range(start, stop):
        n_idx = i * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < end
        k, v, k_scale, v_scale = load_block(
            store, n_idx, n_mask, d_idx, d_mask, kv_heads, DIM, STORE_BLOCK, KV_DTYPE, None
        )
        row_max, row_sum, acc, odd = attention_block(
            q, k, v, k_scale, v_scale, n_idx, n_mask, at, row_max, row_sum, acc, odd, scale, window, softcap, slope,
            padding_mask_ptr, KV_DTYPE, None, UPCAST,
        )  # fmt: skip
    unit = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    finish(
        acc, row_max, row_sum, o_ptr, gate, scratch, unit, split, active, tile * USED, new, first_token, g, heads,
        m_mask, GROUP, DIM, USED, COMBINE,
    )  # fmt: skip


def paged_attention(
    q, k, v, kv, scale, *, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None, window=None, softcap=None,
    sinks=None, slopes=None, gate=None, gate_activation="sigmoid", norms_after=False, q_scales=None,
    chunked=False, dense=None, skipped=0, bias=None, mask=None,
):  # fmt: skip
    """Same arguments and result as the reference; head dimension up to 512."""
    turning = {"cos": cos, "sin": sin, "interleaved": interleaved, "q_norm": q_norm, "k_norm": k_norm}
    turning |= {"norms_after": norms_after, "q_scales": q_scales}
    scores = {"window": window, "softcap": softcap, "sinks": sinks, "slopes": slopes, "gate": gate}
    scores |= {"gate_activation": gate_activation, "chunked": chunked}
    if mask is not None:
        q = rotary_store(q, k, v, kv, **turning)
        if kv.ragged is not None:
            kv = kv._replace(table=kv.table.index_select(0, kv.ragged.rows[:1]), ordered=False)
        out = masked_attention(q, *kv.read(mask.shape[-1], q.dtype), mask, scale, softcap, sinks, slopes)
        return apply_gate(out, gate, gate_activation)
    if kv.ragged is not None:
        return ragged_attention(q, k, v, kv, scale, turning, scores)
    if q.shape[1] == 1 and not skipped:
        return decode(q, k, v, kv, scale, bias=bias, **turning, **scores)
    (rows, new, heads, dim), kv_heads = q.shape, kv.keys.shape[2]
    extras = (kv.padding_mask, softcap, sinks, slopes)
    plain = all(e is None for e in extras) and (window is None or window >= new)
    # Of other sizes it keeps all scores; and keys that are stored already a graph does not know.
    torchs = new > 1 if not kv.by_address else new > SHORT and dim % 8 == 0 and k is not None
    torchs = torchs and dim <= 256 and not skipped
    if kv.is_prefill and plain and q.is_cuda and torchs:
        out = _fresh(q, k, v, kv, scale, dense or PromptAttention(), **turning)
        return apply_gate(out, gate, gate_activation)
    q = rotary_store(q, k, v, kv, **turning)
    out = torch.empty((rows, new, heads * dim), device=q.device, dtype=q.dtype)
    tile = tile_of(new * (heads // kv_heads), kv.block, q)
    tiles = cdiv(new * (heads // kv_heads), tile.queries)
    # A prompt in a graph has few keys to a query, and room for shares would stay with the graph.
    splits = 1 if kv.is_prefill and kv.by_address else split_count(rows * kv_heads * tiles, q.device)
    attend_tiles(q, out, kv, scale, (tiles, rows * kv_heads, splits), tile, skipped=skipped, **scores)
    return out


def attend_tiles(
    q, out, kv, scale, grid, tile, prefills=False, skipped=0, *, window, softcap, sinks, slopes, gate, gate_activation,
    chunked,
):  # fmt: skip
    """Launches the kernel over tiles of queries, which are stored and rotated already. prefills: see `rotary_store`."""
    _, new, heads, dim = q.shape
    tiles, units, splits = grid
    kv_heads = kv.keys.shape[2]
    group = heads // kv_heads
    kept = units * tiles * tile.queries * MOST_SPLITS
    scratch = scratch_of(units * tiles, splits, kept, tile.channels, q.device, kv.split_counters)
    launch(
        paged_attention_kernel, grid, q, out, gate_of(gate, gate_activation), scratch, sinks, slopes, kv.metadata,
        None if kv.ragged is None else kv.ragged.pointers(), kv.layer, new, heads, kv_heads, float(scale), window,
        None if softcap is None else float(softcap), splits, skipped,
        GROUP=group, DIM=dim, HAS_PADDING_MASK=kv.padding_mask is not None, STORE_BLOCK=kv.block,
        BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_D=tile.channels, COMBINE=combined_rows(group * new, dim),
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), PREFILLS=prefills, UPCAST=upcast(q.dtype), CHUNKED=chunked,
        num_warps=tile.warps, num_stages=tile.stages, **programmatic(q.device),
    )  # fmt: skip


def ragged_attention(q, k, v, kv, scale, turning, scores):
    """`paged_attention` of a `Ragged`. turning: angles and norms of heads; scores: what changes them, and the gate."""
    ragged, (tokens, heads, dim) = kv.ragged, q.shape[1:]
    kv_heads = kv.keys.shape[2]
    group = heads // kv_heads
    # Tiles write only rows of sequences; the kernel of the decodes writes every row that it is launched for.
    make = torch.zeros if ragged.most_prefills or ragged.most_decodes < tokens else torch.empty
    out = make((1, tokens, heads * dim), device=q.device, dtype=q.dtype)
    most = min(ragged.most_decodes, tokens)
    if most > 0:
        single = [None if t is None else t.transpose(0, 1)[:most] for t in (q, k, v)]
        angles = {name: None if turning[name] is None else turning[name].transpose(0, 1)[:most] for name in ANGLES}
        gates = None if scores["gate"] is None else scores["gate"].transpose(0, 1)[:most]
        decode(*single, kv, scale, out.view(tokens, 1, -1), **turning | angles, **scores | {"gate": gates})
    if ragged.most_prefills:
        q = rotary_store(q, k, v, kv, prefills=most > 0, **turning)
        tile = tile_of(group * tokens, kv.block, q)
        tile = tile._replace(queries=max(tile.queries, power_of_two(group)))
        tiles = tokens // (tile.queries // group) + ragged.most_prefills
        attend_tiles(q, out, kv, scale, (tiles, kv_heads, 1), tile, most > 0, **scores)
    return out


def _fresh(q, k, v, kv, scale: float, dense, **turning):
    """A prompt without past: torch's own causal attention, over the keys as they lie in the store or are put there.

    A graph knows no store; and the rounded ones torch cannot read.
    """
    rows, new = q.shape[:2]
    if kv.key_scales is None and not kv.by_address:
        q = rotary_store(q, k, v, kv, **turning)
        keys, values = (t.view(rows, -1, *t.shape[2:])[:, :new] for t in (kv.keys, kv.values))
    else:
        q, keys, values = rotary_store(q, k, v, kv, **turning, shown=True)
    out = dense(*(t.transpose(1, 2) for t in (q, keys, values)), scale, kv.layer == 0, again=kv.by_address)
    return out.transpose(1, 2).reshape(rows, new, -1)
