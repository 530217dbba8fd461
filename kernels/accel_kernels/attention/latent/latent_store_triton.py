"""New latents normed, their shared part of the key rotated, both stored; queries rotated and taken to the latents.

The key of a head is its part of `up` times the latent, so the score is (q up) latent: `up` is absorbed into few
queries here, while many queries are left to cuBLAS.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.kv_quantization_triton import kv_dtype_of, rounded
from accel_kernels.attention.paged.rotary_store_triton import apply_rope, norms_of_heads
from accel_kernels.attention.paged.store_triton import AT_LAYERS, AT_LENGTH, OF_EACH, stored_at, table_row
from accel_kernels.device import programmatic, upcast
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

TOKENS, CHANNELS = 16, 64  # of a program


@triton.jit(do_not_specialize=("layer", "new", "tokens"))
def latent_store_kernel(
    q_ptr, latents_ptr, up_ptr, cos_ptr, sin_ptr, norm, no_norm, metadata_ptr, ragged, last_ptr, absorbed_ptr,
    turned_ptr, row_ptr, stride_qb, stride_qs, stride_qh, stride_lb, stride_ls, stride_cb, stride_cs, stride_cp, layer,
    new, tokens,
    NOPE: tl.constexpr, VALUES: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr, TO_HALVES: tl.constexpr, HEADS: tl.constexpr, STORE_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    UPCAST: tl.constexpr, KV_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, 0) stores the latents of BLOCK_T tokens; (i, 1 + head * parts + part) takes the queries of a head,
    and BLOCK_C channels of the absorbed ones. up_ptr: None where nothing is absorbed: turned_ptr has whole queries.
    """
    element = q_ptr.dtype.element_ty
    PARTS: tl.constexpr = 1 if up_ptr is None else (RANK + BLOCK_C - 1) // BLOCK_C
    HALF: tl.constexpr = ROPE // 2
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    b, s = t // new, t % new
    in_use = t < tokens
    n_idx = tl.arange(0, BLOCK_N)
    p_idx = tl.arange(0, BLOCK_P)
    n_mask, p_mask = n_idx < NOPE, p_idx < ROPE
    # Channel p of the result is first * cos - second * sin of a pair, or second * cos + first * sin.
    if INTERLEAVED and not TO_HALVES:
        pair, odd = p_idx // 2, p_idx % 2 == 1
    else:
        pair, odd = p_idx % HALF, p_idx >= HALF
    if not ROTATES:
        of, mate = p_idx, p_idx
    elif INTERLEAVED:
        of, mate = 2 * pair + odd.to(tl.int32), 2 * pair + 1 - odd.to(tl.int32)
    else:
        of, mate = p_idx, tl.where(odd, p_idx - HALF, p_idx + HALF)
    sign = tl.where(odd, 1.0, -1.0)
    part = tl.program_id(1) - 1
    head, chunk = part // PARTS, part % PARTS
    c_idx = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
    weight = 0.0
    if up_ptr is not None:  # no kernel writes it
        place = (head * (NOPE + VALUES) + n_idx)[:, None] * RANK + c_idx[None, :]
        in_head = n_idx < tl.where(part < 0, 0, NOPE)
        weight = tl.load(up_ptr + place, mask=in_head[:, None] & (c_idx < RANK)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    counts = in_use
    if ragged is not None:
        sequence = tl.load(ragged.token_sequences + s, mask=in_use, other=-1)
        counts = sequence >= 0
    if last_ptr is not None:  # zeros are taken of tokens behind it
        counts = in_use & (s <= tl.load(last_ptr))
    turning = counts[:, None] & p_mask[None, :]
    cos = 1.0
    sin = 0.0
    if ROTATES:
        angle = (b * stride_cb + s * stride_cs)[:, None] + (pair * stride_cp)[None, :]
        cos = tl.load(cos_ptr + angle, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turning, other=0.0).to(tl.float32)
    if part < 0:
        latents = latents_ptr + (b * stride_lb + s * stride_ls)[:, None]
        r_idx = tl.arange(0, BLOCK_R)
        r_mask = r_idx < RANK
        x = tl.load(latents + r_idx[None, :], mask=counts[:, None] & r_mask[None, :], other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / RANK + norm.eps)
        gain = tl.load(norm.weight + r_idx, mask=r_mask, other=0.0).to(tl.float32) + norm.offset
        x *= rstd[:, None] * gain[None, :]
        shared = apply_rope(latents + RANK, no_norm, t, turning, of, mate, p_mask, cos, sin, sign, ROPE, HALF * ROTATES)
        if ragged is None:
            at = tl.load(metadata_ptr + AT_LENGTH) + s
            stored_row, stores = b, in_use
        else:
            at = tl.load(ragged.lengths + sequence, mask=counts, other=0) + s
            at -= tl.load(ragged.starts + sequence, mask=counts, other=0)
            stored_row = tl.load(ragged.rows + sequence, mask=counts, other=0).to(tl.int64)
            stores = counts
        table = table_row(metadata_ptr, layer, stored_row)
        block = tl.load(table + at // STORE_BLOCK, mask=stores, other=0).to(tl.int64)
        slot = block * STORE_BLOCK + at % STORE_BLOCK
        x_mask, shared_mask = stores[:, None] & r_mask[None, :], stores[:, None] & p_mask[None, :]
        address = AT_LAYERS + OF_EACH * layer
        if KV_DTYPE is None:
            stored = stored_at(metadata_ptr, address, element) + slot[:, None] * (RANK + ROPE)
            tl.store(stored + r_idx[None, :], x.to(element), mask=x_mask)
            stored_part = stored + RANK
        else:
            codes, factors = rounded(x.to(element).to(tl.float32), KV_DTYPE)
            tl.store(
                stored_at(metadata_ptr, address, KV_DTYPE) + slot[:, None] * RANK + r_idx[None, :], codes, mask=x_mask
            )
            tl.store(stored_at(metadata_ptr, address + 2, tl.float32) + slot, factors, mask=stores)
            stored_part = stored_at(metadata_ptr, address + 1, element) + slot[:, None] * ROPE
            x = codes.to(tl.float32) * factors[:, None]
        tl.store(stored_part + p_idx[None, :], shared.to(element), mask=shared_mask)
        if row_ptr is not None:
            row = row_ptr + t[:, None] * (RANK + ROPE)
            tl.store(row + r_idx[None, :], x.to(element), mask=x_mask)
            tl.store(row + RANK + p_idx[None, :], shared.to(element), mask=shared_mask)
    else:
        q_heads = q_ptr + (b * stride_qb + s * stride_qs + head * stride_qh)[:, None]
        q = tl.load(q_heads + n_idx[None, :], mask=counts[:, None] & n_mask[None, :], other=0.0)
        WIDTH: tl.constexpr = NOPE + ROPE if up_ptr is None else ROPE
        turned = turned_ptr + (t * HEADS + head)[:, None] * WIDTH
        if up_ptr is None:
            tl.store(turned + n_idx[None, :], q, mask=in_use[:, None] & n_mask[None, :])
        else:
            if UPCAST:
                q, weight = q.to(tl.float32), weight.to(tl.float32)
            absorbed = tl.dot(q, weight, input_precision="ieee")
            absorbed_to = absorbed_ptr + (t * HEADS + head)[:, None] * RANK + c_idx[None, :]
            tl.store(absorbed_to, absorbed.to(element), mask=in_use[:, None] & (c_idx < RANK)[None, :])
        if chunk == 0:
            y = apply_rope(q_heads + NOPE, no_norm, t, turning, of, mate, p_mask, cos, sin, sign, ROPE, HALF * ROTATES)
            there = in_use[:, None] & p_mask[None, :]
            tl.store(turned + (WIDTH - ROPE) + p_idx[None, :], y.to(element), mask=there)


def latent_store(q, compressed, kv, up, absorbs, *, norm, cos=None, sin=None, interleaved=False, to_halves=False):
    """Stores the new latents. Returns (absorbed, turned, rows); other arguments as `latent_attention`.

    absorbs: whether absorbed are the queries times `up`, (rows, new, heads, R), and turned their rotated part alone,
    (rows, new, heads, P). Else absorbed is None, and turned are whole queries, (rows, new, heads, N + P).
    rows: what is stored for the new tokens, as it is read, (rows, new, R + P), or None where `absorbs`.
    """
    (rows, new, heads, width), rank = q.shape, up.shape[-1]
    rope = compressed.shape[-1] - rank
    nope = width - rope
    like = {"device": q.device, "dtype": q.dtype}
    absorbed = torch.empty((rows, new, heads, rank), **like) if absorbs else None
    turned = torch.empty((rows, new, heads, rope if absorbs else width), **like)
    stored = None if absorbs else torch.empty((rows, new, rank + rope), **like)
    angles = (0, 0, 0) if cos is None else (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), cos.stride(2))
    grid = (cdiv(rows * new, TOKENS), 1 + heads * (cdiv(rank, CHANNELS) if absorbs else 1))
    launch(
        latent_store_kernel, grid, q, compressed, up if absorbs else None, cos, sin, kernel_arguments(norm)[0],
        norms_of_heads(None, None, False, None)[0], kv.metadata, None if kv.ragged is None else kv.ragged.pointers(),
        kv.last, absorbed, turned, stored, *q.stride()[:3], *compressed.stride()[:2], *angles, kv.layer, new,
        rows * new,
        NOPE=nope, VALUES=up.shape[1] - nope, RANK=rank, ROPE=rope, ROTATES=cos is not None, INTERLEAVED=interleaved,
        TO_HALVES=to_halves, HEADS=heads, STORE_BLOCK=kv.block, BLOCK_T=TOKENS, BLOCK_N=max(16, power_of_two(nope)),
        BLOCK_C=CHANNELS, BLOCK_R=power_of_two(rank), BLOCK_P=max(16, power_of_two(rope)), UPCAST=upcast(q.dtype),
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), num_warps=4, **programmatic(q.device),
    )  # fmt: skip
    return absorbed, turned, stored
