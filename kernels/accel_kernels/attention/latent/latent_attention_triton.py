"""Attention over stored latents: a program takes a block of (token, head) pairs and a share of the tokens.

All heads are rows of one product with the latents, which are keys and values at once and are read once. Few queries
share the tokens out to many programs (split-KV, "flash decoding", Dao et al. 2023).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from accel_kernels.attention.latent.latent_store_triton import latent_store
from accel_kernels.attention.latent.latent_values_triton import latent_values, share_of_tile
from accel_kernels.attention.paged.kv_quantization_triton import kv_dtype_of
from accel_kernels.attention.paged.online_softmax_triton import IN_BASE_2
from accel_kernels.attention.paged.paged_attention_triton import sequence_of_tile
from accel_kernels.attention.paged.split_kv import Tile, split_count
from accel_kernels.attention.paged.store_triton import AT_LAYERS, OF_EACH, padding_mask_of, row_of, stored_at
from accel_kernels.attention.prefill_attention import PromptAttention
from accel_kernels.device import Feature, has, programmatic, shared_memory, upcast
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

FEW = 16  # new tokens of a prompt without past that are not expanded
MOST_ABSORBED = 64  # tokens of a call that are multiplied by `up` inside our kernels: cuBLAS takes more
MOST_EXPANDED = 32  # and whose results are
MOST_SPLITS = 128


def latent_tile(queries: int, channels: int, store_block: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Of few queries as measured on an H100, where two tiles of 16 are faster than one of 32; of more by registers and
    shared memory, as compiled for latents of 512 and 64 channels.
    """
    if dtype == torch.float32:
        return Tile(16, min(store_block, 16), channels, 8, 1)
    room = shared_memory(device) // 1024
    if queries > 32 and has(device, Feature.WARPGROUPS):  # wgmma takes 64 rows
        return Tile(64, min(store_block, 64), channels, 8, 2)
    if queries > 16 and room > 192:
        return Tile(16 if queries <= 32 else 32, min(store_block, 64), channels, 8, 3)
    return Tile(16, min(store_block, 32), channels, 4, 4 if room > 128 else 3)


@triton.jit(do_not_specialize=("layer", "new", "splits"))
def latent_attention_kernel(
    q_ptr, turned_ptr, o_ptr, sums_ptr, stats_ptr, metadata_ptr, ragged, layer, new, stride_turned, scale, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HAS_PADDING_MASK: tl.constexpr,
    STORE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, UPCAST: tl.constexpr, KV_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KV_DTYPE: None, or of codes, which are read as what they stand for: products with codes themselves would put the
    scales on weights, which fp16 has no room for.
    """
    element = q_ptr.dtype.element_ty
    tile = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_token = b * new
    if ragged is not None:
        b, tile, first_token, new = sequence_of_tile(tile, ragged, BLOCK_M, False, HEADS)
    stored, table = row_of(metadata_ptr, layer, b, ragged)
    place = AT_LAYERS + OF_EACH * layer
    STRIDE: tl.constexpr = RANK + ROPE if KV_DTYPE is None else RANK
    APART: tl.constexpr = RANK + ROPE if KV_DTYPE is None else ROPE
    if KV_DTYPE is None:
        latents = stored_at(metadata_ptr, place, element)
        parts = latents + RANK
        factors = None
    else:
        latents = stored_at(metadata_ptr, place, KV_DTYPE)
        parts = stored_at(metadata_ptr, place + 1, element)
        factors = stored_at(metadata_ptr, place + 2, tl.float32)
    padding_mask_ptr = None
    if HAS_PADDING_MASK:
        padding_mask_ptr = padding_mask_of(metadata_ptr, b, STORE_BLOCK)
    end, share, active = share_of_tile(stored, tile, tl.maximum(new, 1), splits, HEADS, BLOCK_M, BLOCK_N)
    start = split * share
    stop = tl.minimum(start + share, tl.cdiv(end, BLOCK_N))
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = pair < new * HEADS
    at = stored + pair // HEADS
    row = first_token * HEADS + pair
    r_idx, p_idx = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    r_mask, p_mask = r_idx < RANK, p_idx < ROPE
    if PDL:
        tl.extra.cuda.gdc_wait()
    q = tl.load(q_ptr + row[:, None] * RANK + r_idx[None, :], mask=m_mask[:, None] & r_mask[None, :], other=0.0)
    turned_mask = m_mask[:, None] & p_mask[None, :]
    turned = tl.load(turned_ptr + row[:, None] * stride_turned + p_idx[None, :], mask=turned_mask, other=0.0)
    if UPCAST:
        q, turned = q.to(tl.float32), turned.to(tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    # An entry of the table is read an iteration ahead: where it is read and used in one, its wait is a wait for all.
    block = tl.load(table + tl.minimum(start, stop - 1) * BLOCK_N // STORE_BLOCK).to(tl.int64)
    for i in range(start, tl.where(tile * BLOCK_M < new * HEADS, stop, start)):  # no sequence may have this tile
        n_idx = i * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n_idx < end
        slot = block * STORE_BLOCK + n_idx % STORE_BLOCK
        latent = tl.load(
            latents + slot[:, None] * STRIDE + r_idx[None, :], mask=n_mask[:, None] & r_mask[None, :], other=0.0
        )
        shared = tl.load(
            parts + slot[:, None] * APART + p_idx[None, :], mask=n_mask[:, None] & p_mask[None, :], other=0.0
        )
        block = tl.load(table + tl.minimum(i + 1, stop - 1) * BLOCK_N // STORE_BLOCK).to(tl.int64)
        if KV_DTYPE is not None:
            factor = tl.load(factors + slot, mask=n_mask, other=0.0)
            latent = (latent.to(tl.float32) * factor[:, None]).to(element)
        if UPCAST:
            latent, shared = latent.to(tl.float32), shared.to(tl.float32)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(shared), scores, input_precision="ieee") * (scale * IN_BASE_2)
        seen = n_mask[None, :] & (n_idx[None, :] <= at[:, None])
        if padding_mask_ptr is not None:
            seen &= (tl.load(padding_mask_ptr + n_idx, mask=n_mask, other=0) != 0)[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        top = tl.where(new_max == -float("inf"), 0.0, new_max)  # nothing seen yet: keep infinities apart
        p = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(row_max - top)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    mask = m_mask[:, None] & r_mask[None, :]
    if sums_ptr is None:
        y = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        tl.store(o_ptr + row[:, None] * RANK + r_idx[None, :], y.to(element), mask=mask)
    elif split < active:
        mine = row * splits + split
        tl.store(sums_ptr + mine[:, None] * RANK + r_idx[None, :], acc, mask=mask)
        tl.store(stats_ptr + mine * 2, row_max, mask=m_mask)
        tl.store(stats_ptr + mine * 2 + 1, row_sum, mask=m_mask)


def latent_attention(
    q, compressed, kv, up, scale, *, norm, cos=None, sin=None, interleaved=False, to_halves=False, dense=None
):  # fmt: skip
    """Same arguments and result as the reference.

    A prompt without past or padding is expanded to keys and values of the new tokens, for torch's attention. All else
    is computed on latents.
    """
    turning = {"norm": norm, "cos": cos, "sin": sin, "interleaved": interleaved, "to_halves": to_halves}
    (rows, new, heads, width), (_, channels, rank) = q.shape, up.shape
    nope = width - (compressed.shape[-1] - rank)
    ragged = kv.ragged
    fresh = kv.is_prefill and new > FEW and kv.padding_mask is None and ragged is None
    absorbs = not fresh and rows * new <= MOST_ABSORBED
    absorbed, turned, stored = latent_store(q, compressed, kv, up, absorbs, **turning)
    if fresh:
        return _expanded(turned, stored, up, scale, dense or PromptAttention(), kv)
    if absorbed is None:
        absorbed = torch.empty((rows, new, heads, rank), device=q.device, dtype=q.dtype)
        _by_head(turned[..., :nope], up[:, :nope], absorbed)
        turned = turned[..., nope:]
    most = new if ragged is None or ragged.most_prefills else 1
    tile = latent_tile(most * heads, power_of_two(rank), kv.block, q.dtype, q.device)
    tiles = cdiv(new * heads, tile.queries)
    splits = split_count(rows * tiles, q.device, fill=1, most=MOST_SPLITS)
    if ragged is not None:  # some tiles stay empty
        tiles = new * heads // tile.queries + ragged.most_decodes + ragged.most_prefills
    latents = sums = stats = None
    if splits == 1:
        latents = torch.empty_like(absorbed) if ragged is None else torch.zeros_like(absorbed)
    else:
        sums, stats = (
            torch.empty((rows * new * heads, splits, size), device=q.device, dtype=torch.float32) for size in (rank, 2)
        )
    launch(
        latent_attention_kernel, (tiles, rows, splits),
        absorbed, turned, latents, sums, stats, kv.metadata,
        None if ragged is None else ragged.pointers(), kv.layer, new, turned.stride(2), float(scale), splits,
        HEADS=heads, RANK=rank, ROPE=width - nope, HAS_PADDING_MASK=kv.padding_mask is not None, STORE_BLOCK=kv.block,
        BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_R=tile.channels,
        BLOCK_P=max(16, power_of_two(width - nope)), UPCAST=upcast(q.dtype),
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), num_warps=tile.warps, num_stages=tile.stages,
        **programmatic(q.device),
    )  # fmt: skip
    if sums is not None:
        expands = rows * new <= MOST_EXPANDED
        out = latent_values(sums, stats, kv, up, nope, (rows, new, heads), q.dtype, tile.queries, tile.keys, expands)
        if expands:
            return out.flatten(2)
        latents = out
    out = torch.empty((rows, new, heads, channels - nope), device=q.device, dtype=q.dtype)
    _by_head(latents, up[:, nope:].mT, out)
    return out.flatten(2)


def _by_head(x, weights, out):
    """out = x times its head's weight, (rows, new, heads, channels) each."""
    torch.bmm(x.flatten(0, 1).transpose(0, 1), weights, out=out.flatten(0, 1).transpose(0, 1))


def _expanded(q, stored, up, scale, dense, kv):
    """A prompt without past, as torch's own causal attention. Values get as many channels as keys, as flash takes."""
    heads, channels, rank = up.shape
    rope = stored.shape[-1] - rank
    nope = q.shape[-1] - rope
    expanded = F.linear(stored[..., :rank], up.flatten(0, 1)).unflatten(-1, (heads, channels))
    shared = stored[..., None, rank:].expand(-1, -1, heads, -1)
    keys, values = torch.cat((expanded[..., :nope], shared), dim=-1), expanded[..., nope:]
    if channels - nope < q.shape[-1]:
        values = F.pad(values, (0, q.shape[-1] - values.shape[-1]))
    out = dense(*(t.transpose(1, 2) for t in (q, keys, values)), scale, kv.layer == 0, again=kv.by_address)
    return out[..., : channels - nope].transpose(1, 2).flatten(2)
