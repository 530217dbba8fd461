"""New queries, keys and values: normed per head, rotated (Su et al. 2021), queries packed, keys and values stored.

A program takes one token's block of heads of one kind. The store is found by address, see `paged.kv`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.kv_quantization_triton import kv_dtype_of, rounded
from accel_kernels.attention.paged.store_triton import AT_LAYERS, AT_LENGTH, OF_EACH, stored_at, table_row
from accel_kernels.device import programmatic
from accel_kernels.norm.norm import Norm
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

MOST_HEADS = 32  # to a program


class HeadNormArguments(NamedTuple):
    """A norm of heads as kernels take it: its weight before the rotation, or behind it; factors: one of each token."""

    before: torch.Tensor | None = None
    behind: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0


def norms_of_heads(
    q_norm: Norm | None, k_norm: Norm | None, after: bool, q_scales: torch.Tensor | None
) -> tuple[HeadNormArguments, HeadNormArguments]:
    """Those of queries and keys, see `paged_attention`."""
    made = []
    for norm, factors in ((q_norm, q_scales), (k_norm, None)):
        weight, eps, offset = (None, 0.0, 0.0) if norm is None else (norm.weight, norm.eps, norm.offset)
        made.append(HeadNormArguments(*((None, weight) if after else (weight, None)), factors, eps, offset))
    return made[0], made[1]


@triton.jit(do_not_specialize=("layer", "new"))
def rotary_store_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cos_ptr, sin_ptr, q_norm, k_norm, metadata_ptr, ragged, last_ptr, shown_k_ptr,
    shown_v_ptr, stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_cb, stride_cs, stride_cp, layer, new, heads, kv_heads,
    DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, STORE_BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, KV_DTYPE: tl.constexpr, PREFILLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // new).to(tl.int64)
    s = (tl.program_id(0) % new).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if ragged is None:
        token = tl.load(metadata_ptr + AT_LENGTH) + s
        stored_row = b
    else:
        sequence = tl.load(ragged.token_sequences + s)
        least = 0
        if PREFILLS:
            least = tl.load(ragged.counts)
        if sequence < least:  # fills the call up, or is stored by the kernel of the decodes
            if PDL:
                tl.extra.cuda.gdc_wait()
            return
        token = tl.load(ragged.lengths + sequence) + s - tl.load(ragged.starts + sequence)
        stored_row = tl.load(ragged.rows + sequence).to(tl.int64)
    read, kv_read = heads, kv_heads  # as many heads are there, none of a token that does not count
    if last_ptr is not None:
        counts = (s <= tl.load(last_ptr)).to(tl.int32)
        read, kv_read = heads * counts, kv_heads * counts
    block = tl.load(table_row(metadata_ptr, layer, stored_row) + token // STORE_BLOCK).to(tl.int64)
    slot = (block * STORE_BLOCK + token % STORE_BLOCK) * kv_heads
    q_blocks = tl.cdiv(heads, BLOCK_H)
    k_blocks = tl.cdiv(kv_heads, BLOCK_H)
    part = tl.program_id(1)
    h_idx = tl.arange(0, BLOCK_H)
    d_idx = tl.arange(0, BLOCK_D)
    mate, sign, pair = mates(d_idx, PAIRS, INTERLEAVED)
    d_mask = d_idx < DIM
    if PDL:
        tl.extra.cuda.gdc_wait()
    angle = b * stride_cb + s * stride_cs + pair * stride_cp
    cos, sin = angle_of(cos_ptr, sin_ptr, angle, d_idx, PAIRS)
    element = o_ptr.dtype.element_ty
    if part < q_blocks:
        h = part * BLOCK_H + h_idx
        mask, there = (h < heads)[:, None] & d_mask[None, :], (h < read)[:, None] & d_mask[None, :]
        heads_ptr = q_ptr + b * stride_qb + s * stride_qs + h[:, None] * stride_qh
        q = apply_rope(heads_ptr, q_norm, b * new + s, there, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
        tl.store(o_ptr + ((b * new + s) * heads + h[:, None]) * DIM + d_idx[None, :], q.to(element), mask=mask)
    elif k_ptr is None:
        pass
    elif part < q_blocks + k_blocks:
        h = (part - q_blocks) * BLOCK_H + h_idx
        mask, there = (h < kv_heads)[:, None] & d_mask[None, :], (h < kv_read)[:, None] & d_mask[None, :]
        heads_ptr = k_ptr + b * stride_kb + s * stride_ks + h[:, None] * stride_kh
        k = apply_rope(heads_ptr, k_norm, b * new + s, there, d_idx, mate, d_mask, cos, sin, sign, DIM, PAIRS)
        put(
            k.to(element), metadata_ptr, layer, 0, block, slot, token, h, d_idx, mask, kv_heads, b * new + s,
            shown_k_ptr, DIM, STORE_BLOCK, KV_DTYPE,
        )  # fmt: skip
    else:
        h = (part - q_blocks - k_blocks) * BLOCK_H + h_idx
        mask, there = (h < kv_heads)[:, None] & d_mask[None, :], (h < kv_read)[:, None] & d_mask[None, :]
        heads_ptr = v_ptr + b * stride_vb + s * stride_vs + h[:, None] * stride_vh
        v = tl.load(heads_ptr + d_idx[None, :], mask=there, other=0.0)
        put(
            v, metadata_ptr, layer, 1, block, slot, token, h, d_idx, mask, kv_heads, b * new + s,
            shown_v_ptr, DIM, STORE_BLOCK, KV_DTYPE,
        )  # fmt: skip


@triton.jit
def put(
    x, metadata_ptr, layer, which, block, slot, token, h, d_idx, mask, kv_heads, row, shown_ptr,
    DIM: tl.constexpr, STORE_BLOCK: tl.constexpr, KV_DTYPE: tl.constexpr,
):  # fmt: skip
    """Stores a token's heads h of keys (which = 0) or values (1), rounded where the store has 8 bits. What the store
    then holds goes to shown_ptr too, if it is not None, in the dtype of x.
    """
    place = AT_LAYERS + OF_EACH * layer + which
    if KV_DTYPE is None:
        kept = stored_at(metadata_ptr, place, x.dtype)
        tl.store(kept + (slot + h[:, None]) * DIM + d_idx[None, :], x, mask=mask)
        shown = x
    else:
        codes, scale = rounded(x.to(tl.float32), KV_DTYPE)
        head = block * STORE_BLOCK * kv_heads + (token % STORE_BLOCK) * kv_heads + h
        tl.store(stored_at(metadata_ptr, place, KV_DTYPE) + head[:, None] * DIM + d_idx[None, :], codes, mask=mask)
        scales = stored_at(metadata_ptr, place + 2, tl.float32)
        tl.store(scales + (block * kv_heads + h) * STORE_BLOCK + token % STORE_BLOCK, scale, mask=h < kv_heads)
        shown = (codes.to(tl.float32) * scale[:, None]).to(x.dtype)
    if shown_ptr is not None:
        tl.store(shown_ptr + (row * kv_heads + h[:, None]) * DIM + d_idx[None, :], shown, mask=mask)


@triton.jit
def mates(d_idx, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, PARTS: tl.constexpr = 1):
    """The mate and sign of each channel, and its pair. The first 2 PAIRS channels turn together with their mates, which
    are in the same of PARTS: first * cos - second * sin, second * cos + first * sin.
    """
    HALF: tl.constexpr = PAIRS // PARTS if PAIRS > 0 else 1
    if INTERLEAVED:
        pair, odd = d_idx // 2, d_idx % 2
        mate = d_idx + 1 - 2 * odd
        sign = tl.where(odd == 0, -1.0, 1.0)
    else:
        inside, pair = d_idx, d_idx % HALF
        if PARTS > 1:
            inside = d_idx % (2 * HALF)
            pair += d_idx // (2 * HALF) * HALF
        mate = tl.where(inside < HALF, d_idx + HALF, d_idx - HALF)
        sign = tl.where(inside < HALF, -1.0, 1.0)
    return tl.where(d_idx < 2 * PAIRS, mate, d_idx), sign, pair


@triton.jit
def angle_of(cos_ptr, sin_ptr, place, d_idx, PAIRS: tl.constexpr):
    """Cosine and sine of each channel. place: where those of its pair lie, see `mates`."""
    cos = 1.0
    sin = 0.0
    if PAIRS > 0:
        turns = d_idx < 2 * PAIRS
        cos = tl.load(cos_ptr + place, mask=turns, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + place, mask=turns, other=0.0).to(tl.float32)[None, :]
    return cos, sin


@triton.jit
def apply_rope(
    heads_ptr, norm, token, mask, d_idx, mate, d_mask, cos, sin, sign, DIM: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """A block of a token's heads, normed and rotated, in fp32. norm: `HeadNormArguments`."""
    x = tl.load(heads_ptr + d_idx[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0
    if norm.before is not None:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + norm.eps)[:, None]
        x *= rstd * (tl.load(norm.before + d_idx, mask=d_mask, other=0.0).to(tl.float32) + norm.offset)[None, :]
    if PAIRS > 0:
        y = tl.load(heads_ptr + mate[None, :], mask=mask, other=0.0).to(tl.float32)
        if norm.before is not None:
            y *= rstd * (tl.load(norm.before + mate, mask=d_mask, other=0.0).to(tl.float32) + norm.offset)[None, :]
        x = x * cos + sign[None, :] * y * sin
    if norm.behind is not None:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + norm.eps)[:, None]
        x *= rstd * (tl.load(norm.behind + d_idx, mask=d_mask, other=0.0).to(tl.float32) + norm.offset)[None, :]
    if norm.factors is not None:
        x *= tl.load(norm.factors + token)
    return x


def rotary_store(
    q, k, v, kv, cos=None, sin=None, interleaved=False, q_norm=None, k_norm=None, norms_after=False, q_scales=None,
    shown=False, prefills=False,
):  # fmt: skip
    """Stores the new keys and values; returns the queries, (rows, new, heads, D) contiguous.

    Arguments as `paged_attention`.

    k, v: None where nothing is to be stored.

    shown: returns (queries, keys, values), the last two as the store has them, rounded where it rounds them,
    (rows, new, kv heads, D) contiguous. prefills: of a `Ragged`, leaves the decodes out.
    """
    rows, new, heads, dim = q.shape
    kv_heads = kv.keys.shape[2]
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    strides = [(0, 0, 0) if t is None else t.stride()[:3] for t in (q, k, v)]
    keys, values = (torch.empty(k.shape, device=q.device, dtype=q.dtype) if shown else None for _ in range(2))
    pairs = 0 if cos is None else cos.shape[-1]
    angles = (0, 0, 0) if cos is None else (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), cos.stride(2))
    block_h = min(MOST_HEADS, power_of_two(max(heads, kv_heads)))
    grid = (rows * new, cdiv(heads, block_h) + (0 if k is None else 2 * cdiv(kv_heads, block_h)))
    launch(
        rotary_store_kernel, grid,
        q, k, v, out, cos, sin, *norms_of_heads(q_norm, k_norm, norms_after, q_scales), kv.metadata,
        None if kv.ragged is None else kv.ragged.pointers(), kv.last, keys, values, *strides[0], *strides[1],
        *strides[2], *angles, kv.layer, new, heads, kv_heads,
        DIM=dim, PAIRS=pairs, INTERLEAVED=interleaved, STORE_BLOCK=kv.block, BLOCK_H=block_h, BLOCK_D=power_of_two(dim),
        KV_DTYPE=kv_dtype_of(kv.key_scales, kv.keys), PREFILLS=prefills, num_warps=4, **programmatic(q.device),
    )  # fmt: skip
    return (out, keys, values) if shown else out
