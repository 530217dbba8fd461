"""Many tokens of linear attention: what tokens of a chunk have to do with each other, then states from chunk to chunk.

The first kernel runs for all chunks at once. It writes scores of queries and keys, and with the delta rule the inverse
of I + tril(beta k k^T): new values are then that inverse times beta (v - k S), with the state S before the chunk.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import interpreted, multiprocessors, upcast
from accel_kernels.recurrent.causal_convolution_triton import empty_output, sequence_of
from accel_kernels.recurrent.gates_triton import beta_gate, decay_gate
from accel_kernels.recurrent.recurrence import CHUNK
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

LEVELS = tl.constexpr(CHUNK.bit_length() - 1)  # of halves of a chunk
SUB = tl.constexpr(16)  # tokens of a chunk whose decays by channel are taken pair by pair


@triton.jit
def _lengthened(x, key_eps):
    """By what rows are multiplied: 1 / length, or 1."""
    if key_eps is None:
        factor = tl.full((x.shape[0],), 1.0, tl.float32)
    else:
        x = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=1) + key_eps)
    return factor


@triton.jit
def _inverse(a, i_idx, j_idx, PRECISION: tl.constexpr):
    """Of I + a, where a is strictly lower triangular: of blocks along the diagonal, each from two of half its size."""
    inverse = tl.where(i_idx == j_idx, 1.0, 0.0) - tl.where(i_idx // 2 == j_idx // 2, a, 0.0)
    for level in tl.static_range(1, LEVELS):
        width = 1 << level
        below = tl.where((i_idx // (2 * width) == j_idx // (2 * width)) & (i_idx // width != j_idx // width), a, 0.0)
        product = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _channel_products(
    q, k, total, k_ptr, k_row, total_ptr, k_idx, count, key_eps, KEY_DIM: tl.constexpr, SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_d x[i, d] k[j, d] exp(total[i, d] - total[j, d]) of keys and of queries as x, for i >= j; all in fp32.

    Tokens j are taken in turn against those i of their own SUB, and at once against later ones: from both sides of the
    end of j's SUB the exponents are negative. total_ptr, k_ptr: of the chunk, where rows j are read again.
    """
    i_idx, j_idx = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    d_mask = k_idx < KEY_DIM
    keys = tl.zeros((SIZE, SIZE), tl.float32)
    queries = tl.zeros((SIZE, SIZE), tl.float32)
    for first in range(0, SIZE - SUB, SUB):
        end = tl.sum(tl.where(i_idx == first + SUB - 1, total, 0.0), axis=0)[None, :]
        past = tl.exp(tl.minimum(total - end, 0.0))
        until = tl.where(i_idx // SUB == first // SUB, k * tl.exp(tl.minimum(end - total, 0.0)), 0.0)
        until = tl.trans(until)
        after = i_idx // SUB > first // SUB
        keys += tl.where(after, tl.dot(k * past, until, input_precision=PRECISION), 0.0)
        queries += tl.where(after, tl.dot(q * past, until, input_precision=PRECISION), 0.0)
    for turn in range(SUB):
        other = i_idx // SUB * SUB + turn
        x = tl.load(k_ptr + other * k_row + k_idx, mask=(other < count) & d_mask, other=0.0).to(tl.float32)
        x *= _lengthened(x, key_eps)[:, None]
        x *= tl.exp(tl.minimum(total - tl.load(total_ptr + other * KEY_DIM + k_idx, mask=d_mask, other=0.0), 0.0))
        keys = tl.where(j_idx == other, tl.sum(k * x, axis=1)[:, None], keys)
        queries = tl.where(j_idx == other, tl.sum(q * x, axis=1)[:, None], queries)
    return keys, queries


@triton.jit(do_not_specialize=("tokens",))
def chunk_products_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, q_strides, k_strides, a_strides, b_strides, a_log_ptr, bias_ptr, lower_bound, low,
    high, beta_scale, scale, key_eps, spans_ptr, slots_ptr, positions_ptr, tokens, mixing_ptr, scores_ptr, total_ptr,
    heads, KEY_DIM: tl.constexpr, REPEAT: tl.constexpr, BLOCK_K: tl.constexpr, SIZE: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, ROUND_DECAY: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """mixing: how a chunk's new values come of its values, (SIZE, SIZE) with the delta rule, else a factor of each.

    scores: (SIZE, SIZE). total: the sum of log decays up to each token. All in fp32, for each chunk and head.
    """
    head, number = tl.program_id(0), tl.program_id(1)
    key_head, repeated = head // REPEAT, head % REPEAT
    begin, room, length, _, _ = sequence_of(spans_ptr, slots_ptr, positions_ptr, tokens, tl.program_id(2))
    if number * SIZE >= room:
        return
    DELTA: tl.constexpr = b_ptr is not None
    unit = (begin // SIZE + tl.program_id(2) + number) * heads + head
    begin += number * SIZE
    count = length - number * SIZE
    t_idx = tl.arange(0, SIZE)
    k_idx = tl.arange(0, BLOCK_K)[None, :]
    i_idx, j_idx = t_idx[:, None], t_idx[None, :]
    counted = t_idx < count
    mask = (i_idx < count) & (k_idx < KEY_DIM)
    q_ptr += begin * q_strides[0] + key_head * q_strides[1]
    k_ptr += begin * k_strides[0] + key_head * k_strides[1]
    q = tl.load(q_ptr + i_idx * q_strides[0] + k_idx, mask=mask, other=0.0)
    k = tl.load(k_ptr + i_idx * k_strides[0] + k_idx, mask=mask, other=0.0)
    q_factor, k_factor = _lengthened(q, key_eps) * scale, _lengthened(k, key_eps)
    a_ptr += begin * a_strides[0] + key_head * a_strides[1] + repeated * a_strides[2]
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    if UPCAST:
        q, k = q.to(tl.float32), k.to(tl.float32)
    if CHANNEL_DECAY:
        bias = tl.load(bias_ptr + head * KEY_DIM + k_idx, mask=k_idx < KEY_DIM, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + i_idx * a_strides[0] + k_idx, mask=mask, other=0.0)
        g, dt = decay_gate(a, a_log, bias, lower_bound, low, high, ROUND_DECAY, DELTA)
        total = tl.cumsum(tl.where(mask, g, 0.0), axis=0)
        total_ptr += unit * SIZE * KEY_DIM
        tl.store(total_ptr + i_idx * KEY_DIM + k_idx, total, mask=k_idx < KEY_DIM)
        tl.debug_barrier()  # rows of it are read again
        keys, scores = _channel_products(
            q.to(tl.float32) * q_factor[:, None], k.to(tl.float32) * k_factor[:, None], total, k_ptr, k_strides[0],
            total_ptr, k_idx, count, key_eps, KEY_DIM, SIZE, PRECISION,
        )  # fmt: skip
    else:
        bias = tl.load(bias_ptr + head).to(tl.float32)
        a = tl.load(a_ptr + t_idx * a_strides[0], mask=counted, other=0.0)
        g, dt = decay_gate(a, a_log, bias, lower_bound, low, high, ROUND_DECAY, DELTA)
        total = tl.cumsum(tl.where(counted, g, 0.0), axis=0)
        tl.store(total_ptr + unit * SIZE + t_idx, total)
        between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)) * k_factor[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * q_factor[:, None]
        if DELTA:
            keys = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * k_factor[:, None]
    place = unit * SIZE * SIZE + i_idx * SIZE + j_idx
    tl.store(scores_ptr + place, tl.where(i_idx >= j_idx, scores, 0.0))
    if DELTA:
        b_ptr += begin * b_strides[0] + key_head * b_strides[1] + repeated * b_strides[2]
        beta = beta_gate(tl.load(b_ptr + t_idx * b_strides[0], mask=counted, other=0.0), beta_scale)
        keys = tl.where(i_idx > j_idx, keys * beta[:, None], 0.0)
        tl.store(mixing_ptr + place, _inverse(keys, i_idx, j_idx, PRECISION) * beta[None, :])
    else:
        tl.store(mixing_ptr + unit * SIZE + t_idx, dt)


@triton.jit(do_not_specialize=("tokens",))
def chunk_states_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, q_strides, k_strides, v_strides, state_ptr, state_strides, scale, key_eps, skip_ptr,
    spans_ptr, slots_ptr, positions_ptr, tokens, mixing_ptr, scores_ptr, total_ptr, heads,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, REPEAT: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, SIZE: tl.constexpr, CHANNEL_DECAY: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program takes some of the value channels of a head through all chunks of a sequence, its state in registers."""
    head = tl.program_id(1)
    key_head, repeated = head // REPEAT, head % REPEAT
    begin, room, length, slot, position = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, tokens, tl.program_id(2)
    )  # fmt: skip
    unit = (begin // SIZE + tl.program_id(2)) * heads + head
    t_idx = tl.arange(0, SIZE)[:, None]
    k_idx = tl.arange(0, BLOCK_K)
    d_idx = k_idx[None, :]
    v_idx = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    v_mask = v_idx < VALUE_DIM
    square = t_idx * SIZE + tl.arange(0, SIZE)[None, :]
    places = state_ptr + slot * state_strides[0] + head * state_strides[1]
    places += k_idx[:, None] * state_strides[2] + v_idx * state_strides[3]
    stored = (k_idx < tl.where((slot >= 0) & (position > 0), KEY_DIM, 0))[:, None] & v_mask
    state = tl.load(places, mask=stored, other=0.0)
    q_ptr += begin * q_strides[0] + key_head * q_strides[1]
    k_ptr += begin * k_strides[0] + key_head * k_strides[1]
    v_ptr += begin * v_strides[0] + key_head * v_strides[1] + repeated * v_strides[2]
    o_ptr += (begin * heads + head) * VALUE_DIM
    for first in range(0, room, SIZE):
        at = first + t_idx
        mask = (at < length) & (d_idx < KEY_DIM)
        k = tl.load(k_ptr + at * k_strides[0] + d_idx, mask=mask, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at * q_strides[0] + d_idx, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at * v_strides[0] + v_idx, mask=(at < length) & v_mask, other=0.0).to(tl.float32)
        if CHANNEL_DECAY:
            sums = total_ptr + unit * SIZE * KEY_DIM
            total = tl.load(sums + t_idx * KEY_DIM + d_idx, mask=d_idx < KEY_DIM, other=0.0)
            last = tl.load(sums + (SIZE - 1) * KEY_DIM + k_idx, mask=k_idx < KEY_DIM, other=0.0)
        else:
            total = tl.load(total_ptr + unit * SIZE + t_idx)
            last = tl.load(total_ptr + unit * SIZE + SIZE - 1 + 0 * k_idx)
        k *= _lengthened(k, key_eps)[:, None]
        grown = tl.exp(total)
        if DELTA:
            mixing = tl.load(mixing_ptr + unit * SIZE * SIZE + square)
            new = v - tl.dot(k * grown, state, input_precision=PRECISION)
            new = tl.dot(mixing, new, input_precision=PRECISION)
        else:
            new = v * tl.load(mixing_ptr + unit * SIZE + t_idx)
        q *= (_lengthened(q, key_eps) * scale)[:, None] * grown
        o = tl.dot(q, state, input_precision=PRECISION)
        o = tl.dot(tl.load(scores_ptr + unit * SIZE * SIZE + square), new, o, input_precision=PRECISION)
        if skip_ptr is not None:
            o += tl.load(skip_ptr + head).to(tl.float32) * v
        tl.store(
            o_ptr + at.to(tl.int64) * heads * VALUE_DIM + v_idx, o.to(o_ptr.dtype.element_ty),
            mask=(at < room) & v_mask,
        )  # fmt: skip
        k *= tl.exp(last[None, :] - total)
        state = tl.dot(tl.trans(k), new, state * tl.exp(last)[:, None], input_precision=PRECISION)
        unit += heads
    kept = (k_idx < tl.where((slot >= 0) & (length > 0), KEY_DIM, 0))[:, None] & v_mask
    tl.store(places, state, mask=kept)


def linear_attention_prompt(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, skip=None
):
    """Same arguments and result as the reference."""
    batch, tokens, key_heads, repeat, value_dim = v.shape
    heads, key_dim, count = key_heads * repeat, k.shape[-1], len(sequences.slots)
    out = empty_output(v, (batch, tokens, heads, value_dim), sequences)
    q, k, v, a = (t.flatten(0, 1) for t in (q, k, v, a))  # views wherever they can be
    b = None if b is None else b.flatten(0, 1)
    longest = cdiv(sequences.longest or tokens, CHUNK)
    channel_decay = decay.bias.dim() == 2
    units = (batch * tokens // CHUNK + count) * heads
    scores, mixing, total = (
        torch.empty(shape, device=q.device, dtype=torch.float32)
        for shape in (
            (units, CHUNK, CHUNK),
            (units, CHUNK, 1 if b is None else CHUNK),
            (units, CHUNK, key_dim if channel_decay else 1),
        )
    )
    where = (sequences.spans, sequences.slots, sequences.positions, tokens, mixing, scores, total, heads)
    block_k, block_v = max(16, power_of_two(key_dim)), min(64, max(16, power_of_two(value_dim)))
    if cdiv(value_dim, block_v) * heads * count < multiprocessors(q.device):
        block_v = min(block_v, 32)
    # Operands of 16 bits are exact in three products of their parts; of float32 three products of 11 bits are.
    precision = "ieee" if interpreted() else "bf16x3" if q.dtype == torch.bfloat16 else "tf32x3"
    launch(
        chunk_products_kernel, (heads, longest, count),
        q, k, a, b, *(() if t is None else t.stride() for t in (q, k, a, b)), decay.a_log, decay.bias,
        decay.lower_bound, *decay.limits, beta_scale, scale, key_eps, *where,
        key_dim, repeat, block_k, CHUNK, channel_decay, decay.rounded, precision, upcast(q.dtype),
        num_warps=4,
    )  # fmt: skip
    launch(
        chunk_states_kernel, (cdiv(value_dim, block_v), heads, count),
        q, k, v, out, q.stride(), k.stride(), v.stride(), state, state.stride(), scale, key_eps, skip, *where,
        key_dim, value_dim, repeat, block_k, block_v, CHUNK, channel_decay, b is not None, precision,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
