"""The shares of few queries put together, and taken from latents to the values of each head.

A program takes some channels of the latents of one query, so that every share is read once; the last of them to finish
adds up their parts of the values.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.store_triton import AT_LENGTH
from accel_kernels.device import programmatic
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

CHANNELS = 64  # of latents, of a program


@triton.jit
def share_of_tile(stored, tile, new, splits, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a tile of BLOCK_M pairs of token and head: the tokens they see, blocks of them to a share, and shares."""
    end = stored + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, new - 1) + 1
    blocks = tl.cdiv(end, BLOCK_N)
    share = tl.cdiv(blocks, splits)
    return end, share, tl.cdiv(blocks, share)


@triton.jit(do_not_specialize=("new", "splits"))
def latent_values_kernel(
    sums_ptr, stats_ptr, up_ptr, parts_ptr, split_counters_ptr, o_ptr, metadata_ptr, ragged, new, splits,
    HEADS: tl.constexpr, NOPE: tl.constexpr, VALUES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """up_ptr: None where the latents are the result."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = row % HEADS
    c_idx = part * BLOCK_C + tl.arange(0, BLOCK_C)
    v_idx = tl.arange(0, BLOCK_V)
    c_mask, v_mask = c_idx < RANK, v_idx < VALUES
    weight = 0.0
    if up_ptr is not None:  # no kernel writes it
        place = (head * (NOPE + VALUES) + NOPE + v_idx)[:, None] * RANK + c_idx[None, :]
        weight = tl.load(up_ptr + place, mask=v_mask[:, None] & c_mask[None, :], other=0.0)
    if ragged is None:
        stored = tl.load(metadata_ptr + AT_LENGTH).to(tl.int32)
        tile = (row % (new * HEADS)).to(tl.int32) // BLOCK_M
        _, _, active = share_of_tile(stored, tile, new, splits, HEADS, BLOCK_M, BLOCK_N)
    else:
        sequence = tl.load(ragged.token_sequences + row // HEADS)
        counts = sequence >= 0
        stored = tl.load(ragged.lengths + sequence, mask=counts, other=0)
        first = tl.load(ragged.starts + sequence, mask=counts, other=0)
        tile = (row - first * HEADS).to(tl.int32) // BLOCK_M
        new = tl.load(ragged.starts + sequence + 1, mask=counts, other=1) - first
        _, _, active = share_of_tile(stored, tile, new, splits, HEADS, BLOCK_M, BLOCK_N)
        active = tl.where(counts, active, 0)  # zeros for what fills the call up
    if PDL:
        tl.extra.cuda.gdc_wait()
    s_idx = tl.arange(0, BLOCK_S)
    s_mask = s_idx < active
    shares = row * splits + s_idx
    tops = tl.load(stats_ptr + shares * 2, mask=s_mask, other=-float("inf"))
    totals = tl.load(stats_ptr + shares * 2 + 1, mask=s_mask, other=0.0)
    sums = tl.load(
        sums_ptr + shares[:, None] * RANK + c_idx[None, :], mask=s_mask[:, None] & c_mask[None, :], other=0.0
    )
    top = tl.max(tops, axis=0)
    weights = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(totals * weights, axis=0)
    latent = tl.sum(sums * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    if up_ptr is None:
        tl.store(o_ptr + row * RANK + c_idx, latent.to(o_ptr.dtype.element_ty), mask=c_mask)
    else:
        y = tl.sum(weight.to(tl.float32) * latent[None, :], axis=1)
        tl.store(parts_ptr + (row * PARTS + part) * BLOCK_V + v_idx, y)
        tl.debug_barrier()
        taken = tl.atomic_add(split_counters_ptr + row, 1, sem="acq_rel")
        if taken == PARTS - 1:
            tl.atomic_xchg(split_counters_ptr + row, 0)
            y = tl.zeros((BLOCK_V,), tl.float32)
            for other in tl.static_range(PARTS):  # in one order whoever is last
                y += tl.load(parts_ptr + (row * PARTS + other) * BLOCK_V + v_idx)
            tl.store(o_ptr + row * VALUES + v_idx, y.to(o_ptr.dtype.element_ty), mask=v_mask)


def latent_values(sums, stats, kv, up, nope, shape, dtype, block_m, block_n, expands):
    """Of the partial results of (rows, new, heads) = shape: (rows, new, heads, V), or without `expands` the latents,
    (rows, new, heads, R). sums: (queries, splits, R); stats: (queries, splits, 2).
    """
    (queries, splits, rank), values = sums.shape, up.shape[1] - nope
    parts, block_v = cdiv(rank, CHANNELS), power_of_two(values)
    out = torch.empty((*shape, values if expands else rank), device=sums.device, dtype=dtype)
    scratch = split_counters = None
    if expands:
        scratch = torch.empty(queries * parts * block_v, device=sums.device, dtype=torch.float32)
        split_counters = kv.split_counters
        if split_counters is None or split_counters.numel() < queries:
            split_counters = torch.zeros(queries, device=sums.device, dtype=torch.int32)
    launch(
        latent_values_kernel, (queries, parts), sums, stats, up if expands else None, scratch, split_counters, out,
        kv.metadata, None if kv.ragged is None else kv.ragged.pointers(), shape[1], splits,
        HEADS=shape[2], NOPE=nope, VALUES=values, RANK=rank, BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_S=power_of_two(splits), BLOCK_C=CHANNELS, BLOCK_V=block_v, PARTS=parts, num_warps=4,
        **programmatic(sums.device),
    )  # fmt: skip
    return out
