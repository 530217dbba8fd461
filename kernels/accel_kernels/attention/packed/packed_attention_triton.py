"""Attention of packed sequences: a program takes a tile of queries of one sequence and head, which it looks up itself.

Nothing is launched by lengths, so one graph serves all of as many tokens and sequences; programs without a tile end at
once. Blocks of keys that all queries of a tile see need no mask, and come before those at the edges.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.flash_attention_triton import FP32_TILE, IN_BASE_2, LOG2E, Tile, attend
from accel_kernels.device import multiprocessors, programmatic, shared_memory, upcast
from accel_kernels.sizes import floor_power_of_two, power_of_two
from accel_kernels.warmup import launch, warming_up

SEARCHED = tl.constexpr(256)  # starts that a program reads at once


@triton.jit
def _tile_of_sequence(tile, starts_ptr, keys_ptr, padding_ptr, sequences, tokens, BLOCK_M: tl.constexpr):
    """A tile's first token of the sequence, its first query, the sequence's length, how many keys there are, and how
    many rows of padding its query behind them stands for.

    The tiles of sequence i begin at i + starts[i] // BLOCK_M: that is room for all, and some stay empty. The tokens
    that fill the call up are one more sequence, without keys.
    """
    before = tl.zeros((SEARCHED,), tl.int32)
    for first in range(0, sequences + 1, SEARCHED):
        idx = first + tl.arange(0, SEARCHED)
        begins = idx + tl.load(starts_ptr + idx, mask=idx <= sequences, other=0) // BLOCK_M
        before += ((idx <= sequences) & (begins <= tile)).to(tl.int32)
    sequence = tl.sum(before, axis=0) - 1
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + tl.minimum(sequence + 1, sequences))
    end = tl.where(sequence < sequences, end, tokens)
    length = end - start
    m = (tile - sequence - start // BLOCK_M) * BLOCK_M
    keys = length
    if keys_ptr is not None:
        keys = tl.load(keys_ptr + tl.minimum(sequence, sequences - 1))
    padding = 0
    if padding_ptr is not None:
        padding = tl.load(padding_ptr + tl.minimum(sequence, sequences - 1))
    return start.to(tl.int64), m, length, tl.where(sequence < sequences, keys, 0), padding


@triton.jit(do_not_specialize=("tokens", "sequences", "left", "right", "reach", "query_head", "key_head"))
def packed_attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, starts_ptr, keys_ptr, padding_ptr, bias_ptr, slopes_ptr, places_ptr, by_query_ptr,
    by_key_ptr, q_step, k_step, v_step, query_step, key_step, query_head, key_head, tokens, sequences, scale, left,
    right, reach,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr,
    UPCAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """REST: channels of the second part of a head, a power of two, or 0. Q_HEAD: from head to head, as q_step from
    token to token; constants, so that it is known how wide loads may be.
    """
    h = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    start, m, length, keys, padding = _tile_of_sequence(
        tl.program_id(0), starts_ptr, keys_ptr, padding_ptr, sequences, tokens, BLOCK_M
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    if m >= length:
        return
    m_idx = m + tl.arange(0, BLOCK_M)
    d_idx = tl.arange(0, BLOCK_D)
    m_mask = m_idx < length
    mask = m_mask[:, None] & (d_idx < DIM)[None, :]
    q_rows = q_ptr + start * q_step + h * Q_HEAD + m_idx[:, None] * q_step
    k_ptr += start * k_step + h // GROUP * K_HEAD
    v_ptr += start * v_step + h // GROUP * V_HEAD
    q = tl.load(q_rows + d_idx[None, :], mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    q_rest = None
    rest = 0.0
    if REST:
        r_idx = BLOCK_D + tl.arange(0, REST)
        rest_mask = m_mask[:, None] & (r_idx < DIM)[None, :]
        q_rest = tl.load(q_rows + r_idx[None, :], mask=rest_mask, other=0.0)
        if UPCAST:
            q_rest = q_rest.to(tl.float32)
        rest = tl.zeros((BLOCK_M, REST), tl.float32)
    if bias_ptr is not None:
        bias_ptr += h * (2 * reach + 1)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + h).to(tl.float32) * IN_BASE_2
    query_rows = None
    if places_ptr is not None:
        rows = start + tl.minimum(m_idx, length - 1)
        query_rows = by_query_ptr + h.to(tl.int64) * query_head + rows * query_step
        by_key_ptr += h.to(tl.int64) * key_head + start * key_step
    # Blocks from `first` to below `stop` have keys that are seen; those from `clear` to below `edge` by all queries.
    last = tl.minimum(m + BLOCK_M, length) - 1
    first = 0
    stop = tl.cdiv(keys, BLOCK_N)
    clear = 0
    edge = keys // BLOCK_N
    if right is not None:
        stop = tl.minimum(stop, tl.cdiv(last + right + 1, BLOCK_N))
        edge = tl.minimum(edge, (m + right + 1) // BLOCK_N)
    if left is not None:
        first = tl.maximum(m - left, 0) // BLOCK_N
        clear = tl.minimum(tl.cdiv(tl.maximum(last - left, 0), BLOCK_N), stop)
        edge = tl.maximum(edge, clear)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for i in range(edge - clear):  # not from `clear` on: Triton 3.9 then loads no block ahead
        row_max, row_sum, acc, rest = attend(
            q, q_rest, k_ptr, v_ptr, k_step, v_step, (clear + i) * BLOCK_N, keys, m_idx, row_max, row_sum, acc, rest,
            scale, left, right, bias_ptr, reach, slope, places_ptr, query_rows, by_key_ptr, key_step,
            DIM, BLOCK_N, False, UPCAST, padding_ptr is not None,
        )  # fmt: skip
    for i in range(stop - first - (edge - clear)):
        block = first + i
        if left is not None:
            block += tl.where(block >= clear, edge - clear, 0)
        else:
            block += edge
        row_max, row_sum, acc, rest = attend(
            q, q_rest, k_ptr, v_ptr, k_step, v_step, block * BLOCK_N, keys, m_idx, row_max, row_sum, acc, rest,
            scale, left, right, bias_ptr, reach, slope, places_ptr, query_rows, by_key_ptr, key_step,
            DIM, BLOCK_N, True, UPCAST, padding_ptr is not None,
        )  # fmt: skip
    if padding_ptr is not None:  # its scores are 0, as are those of keys
        behind = m_mask & (m_idx >= tl.where(keys > 0, keys, length))
        times = tl.where(behind, padding.to(tl.float32), 0.0)
        row_sum += times
        own = v_ptr + m_idx[:, None] * v_step
        acc += times[:, None] * tl.load(own + d_idx[None, :], mask=mask & behind[:, None], other=0.0)
        if REST:
            rest += times[:, None] * tl.load(own + r_idx[None, :], mask=rest_mask & behind[:, None], other=0.0)
    share = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    o_rows = o_ptr + ((start + m_idx) * HEADS + h)[:, None] * DIM
    tl.store(o_rows + d_idx[None, :], (acc * share).to(o_ptr.dtype.element_ty), mask=mask)
    if REST:
        tl.store(o_rows + r_idx[None, :], (rest * share).to(o_ptr.dtype.element_ty), mask=rest_mask)


def channels_of(dim: int, even: bool) -> tuple[int, int]:
    """Channels of the two parts of a head, powers of two: a second one where that takes fewer than one larger part.

    even: tokens lie a multiple of 16 numbers apart. Elsewhere Triton 3.6 computes the second part wrong.
    """
    whole, least = max(16, power_of_two(dim)), max(16, floor_power_of_two(dim))
    rest = max(16, power_of_two(dim - least)) if dim > least else 0
    return (least, rest) if even and rest and least + rest < whole else (whole, 0)


def packed_tile(q: torch.Tensor, channels: int, biased: bool, tokens: int, sequences: int, longest: int) -> Tile:
    """For so many channels with padding, as measured on an H100; shared memory has room for them."""
    if q.dtype == torch.float32:
        return FP32_TILE if channels <= 64 else Tile(32, 16, 4, 1)
    queries = min(64, max(16, power_of_two(longest)))
    if channels > 128:
        return Tile(queries, min(queries, 32), 8 if queries == 64 else 4, 2)
    if longest <= 64:
        return Tile(queries, queries, 4 if queries == 64 else 2, 2)
    if biased:  # of which a block lies in shared memory
        return Tile(64, 32, 4, 2)
    stages = 3 if channels <= 64 or shared_memory(q.device) > 128 * 1024 else 2
    # Larger tiles read keys less often, but have more rows behind the ends of sequences, and are fewer.
    if tokens > 512 * sequences and tokens // 128 * q.shape[1] >= multiprocessors(q.device):
        return Tile(128, 64, 4 if 64 < channels < 128 else 8, stages)
    return Tile(64, 32, 4, 2) if channels == 128 else Tile(64, 64, 4, 2 if channels <= 64 else stages)


def packed_attention(
    q, k, v, starts, scale, *, longest, window=None, bias=None, causal=False, slopes=None, keys=None, padding=None,
    by_query=None, by_key=None, places=None,
):  # fmt: skip
    """Same arguments and result as the reference; see `supports`."""
    (tokens, heads, dim), sequences = q.shape, starts.numel() - 1
    out = torch.empty((tokens, heads * dim), device=q.device, dtype=q.dtype)
    block_d, rest = channels_of(dim, not any(t.stride(0) % 16 for t in (q, k, v)))
    sizes = [(tokens, sequences, longest)]
    if warming_up():  # what other lengths take
        sizes += [(2**20, 2**20 // most, most) for most in (16, 32, 64, 512, 1024)]
    left, right = (None, None) if window is None else (min(side, longest) for side in window)
    right = 0 if causal else right
    reach = max((one.shape[-1] // 2 for one in (bias, places) if one is not None), default=0)
    steps = (0,) * 4 if by_query is None else tuple(t.stride(at) for at in (0, 1) for t in (by_query, by_key))
    for tile in dict.fromkeys(packed_tile(q, block_d + rest, reach > 0, *size) for size in sizes):
        launch(
            packed_attention_kernel, (tokens // tile.queries + sequences + 1, heads),
            q, k, v, out, starts, keys, padding, bias, slopes, places, by_query, by_key, q.stride(0), k.stride(0),
            v.stride(0), *steps, tokens, sequences, float(scale) * LOG2E, left, right, reach,
            HEADS=heads, GROUP=heads // k.shape[1], DIM=dim, Q_HEAD=q.stride(1), K_HEAD=k.stride(1),
            V_HEAD=v.stride(1), BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_D=block_d, REST=rest,
            UPCAST=upcast(q.dtype), num_warps=tile.warps, num_stages=tile.stages, **programmatic(q.device),
        )  # fmt: skip
    return out
