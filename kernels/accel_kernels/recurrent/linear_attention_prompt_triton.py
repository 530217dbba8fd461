"""Many tokens of linear attention: what tokens of a chunk have to do with each other, then states from chunk to chunk.

The first kernel runs for all chunks at once. It writes scores of queries and keys, and with the delta rule the inverse
of I + tril(beta k k^T): new values are then that inverse times beta (v - k S), with the state S before the chunk.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import Feature, has, interpreted, shared_memory, upcast
from accel_kernels.recurrent.causal_convolution_triton import AT_STATE, empty_output, pools_at, sequence_of
from accel_kernels.recurrent.gates_triton import beta_gate, decay_gate, decay_sums
from accel_kernels.recurrent.recurrence import CHUNK
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

TWO_STAGES = 140 * 1024  # bytes of shared memory for two chunks at once, of 128 key channels in 16 bits
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
def _parts(x, PAIR: tl.constexpr):
    """x as a sum of two bfloat16, which hold 16 bits of it; with PAIR false x itself, twice."""
    if PAIR:
        high = x.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high, low = x, x
    return high, low


@triton.jit
def _store_parts(ptr, x, SIZE: tl.constexpr, PAIR: tl.constexpr):
    """Writes a square where `_load_parts` finds it."""
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    high, low = _parts(x, PAIR)
    tl.store(ptr + place, high)
    if PAIR:
        tl.store(ptr + SIZE * SIZE + place, low)


@triton.jit
def _load_parts(ptr, SIZE: tl.constexpr, PAIR: tl.constexpr):
    """The transpose of a square, in two parts if PAIR."""
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    high = tl.load(ptr + place)
    low = tl.load(ptr + SIZE * SIZE + place) if PAIR else high
    return tl.trans(high), tl.trans(low)


@triton.jit
def _product(x, y, acc, PRECISION: tl.constexpr):
    """acc + x y in fp32. x: fp32; y: fp32, or bfloat16, where two parts of x are enough."""
    if y.dtype == tl.bfloat16:
        high, low = _parts(x, True)
        acc = tl.dot(low, y, tl.dot(high, y, acc))
    else:
        acc = tl.dot(x, y.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _two_products(x, y, z, PRECISION: tl.constexpr):
    """x y and x z, as `_product`. Both at once, so that the parts of x need not be kept."""
    zeros = tl.zeros((x.shape[0], y.shape[1]), tl.float32)
    if y.dtype == tl.bfloat16:
        high, low = _parts(x, True)
        first, second = tl.dot(high, y, zeros), tl.dot(high, z, zeros)
        first, second = tl.dot(low, y, first), tl.dot(low, z, second)
    else:
        first, second = _product(x, y, zeros, PRECISION), _product(x, z, zeros, PRECISION)
    return first, second


@triton.jit
def _square_product(x, high, low, acc, PRECISION: tl.constexpr, PAIR: tl.constexpr):
    """acc + x (high + low) in fp32. x: fp32; high, low: what `_load_parts` gives."""
    if PAIR:
        x_high, x_low = _parts(x, True)
        acc = tl.dot(x_high, high, tl.dot(x_low, high, tl.dot(x_high, low, acc)))
    else:
        acc = tl.dot(x, high, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _inverse(a, i_idx, j_idx, PRECISION: tl.constexpr):
    """Of I + a, where a is strictly lower triangular: of blocks along the diagonal, each from two of half its size."""
    inverse = tl.where(i_idx == j_idx, 1.0, 0.0) - tl.where(i_idx // 2 == j_idx // 2, a, 0.0)
    for level in range(1, LEVELS):  # no static one: compiling takes a fifth
        below = tl.where((i_idx >> level + 1 == j_idx >> level + 1) & (i_idx >> level != j_idx >> level), a, 0.0)
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


@triton.jit(do_not_specialize=("layer", "tokens"))
def chunk_products_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, q_strides, k_strides, a_strides, b_strides, a_log_ptr, bias_ptr, lower_bound, low,
    high, beta_scale, scale, key_eps, limited_ptr, spans_ptr, slots_ptr, positions_ptr, metadata_ptr, layer, last_ptr,
    tokens, mixing_ptr, scores_ptr, factors_ptr, total_ptr, heads, PADDED: tl.constexpr, KEY_DIM: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK_K: tl.constexpr, SIZE: tl.constexpr, CHANNEL_DECAY: tl.constexpr,
    ROUND_DECAY: tl.constexpr, PRECISION: tl.constexpr, PAIR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """For each chunk and head, in fp32 or parts of it:

    mixing: (SIZE, SIZE), how its new values come of its values by the delta rule; scores: (SIZE, SIZE). factors: of
    keys that meet the state, of queries, of keys that become state, of values without the delta rule. A decay that a
    head has as a whole is in them; `total` is then its sum over the chunk, else the sums up to each token.
    """
    head, number = tl.program_id(0), tl.program_id(1)
    key_head, repeated = head // REPEAT, head % REPEAT
    begin, room, length, _, position, _, _ = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, tokens, tl.program_id(2), PADDED
    )
    if number * SIZE >= room:
        return
    DELTA: tl.constexpr = b_ptr is not None
    unit = (begin // SIZE + tl.program_id(2) + number) * heads + head
    factors_ptr += unit * 4 * SIZE
    PLACES: tl.constexpr = SIZE * SIZE * (2 if PAIR else 1)
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
        if limited_ptr is not None:
            limited = position + number * SIZE + t_idx < tl.load(limited_ptr + tl.program_id(2))
            low, high = tl.where(limited, low, 0.0), tl.where(limited, high, float("inf"))
        g, dt = decay_gate(a, a_log, bias, lower_bound, low, high, ROUND_DECAY, DELTA)
        g = tl.where(counted, g, 0.0)
        total, last, until, between = decay_sums(g, PAIR)
        tl.store(total_ptr + unit, last)
        between = tl.exp(tl.minimum(between, 0.0)) * k_factor[None, :]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * q_factor[:, None]
        if DELTA:
            keys = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * k_factor[:, None]
        tl.store(factors_ptr + 2 * SIZE + t_idx, k_factor * tl.exp(until))
        k_factor *= tl.exp(total)
        q_factor *= tl.exp(total)
    tl.store(factors_ptr + t_idx, k_factor)
    tl.store(factors_ptr + SIZE + t_idx, q_factor)
    _store_parts(scores_ptr + unit * PLACES, tl.where(i_idx >= j_idx, scores, 0.0), SIZE, PAIR)
    if DELTA:
        b_ptr += begin * b_strides[0] + key_head * b_strides[1] + repeated * b_strides[2]
        beta = beta_gate(tl.load(b_ptr + t_idx * b_strides[0], mask=counted, other=0.0), beta_scale)
        keys = tl.where(i_idx > j_idx, keys * beta[:, None], 0.0)
        _store_parts(mixing_ptr + unit * PLACES, _inverse(keys, i_idx, j_idx, PRECISION) * beta[None, :], SIZE, PAIR)
    else:
        tl.store(factors_ptr + 3 * SIZE + t_idx, dt)


@triton.jit(do_not_specialize=("layer", "tokens"))
def chunk_states_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, q_strides, k_strides, v_strides, state_ptr, state_strides, skip_ptr,
    spans_ptr, slots_ptr, positions_ptr, metadata_ptr, layer, last_ptr, tokens, mixing_ptr, scores_ptr, factors_ptr,
    total_ptr, heads, PADDED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, REPEAT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SIZE: tl.constexpr, CHANNEL_DECAY: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr, PAIR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A program takes some of the value channels of a head through all chunks of a sequence.

    All is transposed: the state (values, keys), and what comes of it, stay in registers as left operands of products.
    """
    head = tl.program_id(1)
    key_head, repeated = head // REPEAT, head % REPEAT
    begin, room, length, slot, position, start, into = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, tokens, tl.program_id(2), PADDED
    )
    state_ptr, written_ptr = pools_at(metadata_ptr, layer, state_ptr, AT_STATE)
    unit = (begin // SIZE + tl.program_id(2)) * heads + head
    PLACES: tl.constexpr = SIZE * SIZE * (2 if PAIR else 1)
    t_idx, k_idx = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)[None, :]
    k_mask = k_idx < KEY_DIM
    v_idx = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_mask = v_idx < VALUE_DIM
    places = head * state_strides[1] + k_idx * state_strides[2] + v_idx[:, None] * state_strides[3]
    stored = (k_idx < tl.where((length > 0) & (position > start), KEY_DIM, 0)) & v_mask[:, None]
    state = tl.load(state_ptr + slot * state_strides[0] + places, mask=stored, other=0.0)
    q_ptr += begin * q_strides[0] + key_head * q_strides[1]
    k_ptr += begin * k_strides[0] + key_head * k_strides[1]
    v_ptr += begin * v_strides[0] + key_head * v_strides[1] + repeated * v_strides[2]
    o_ptr += (begin * heads + head) * VALUE_DIM
    zeros = tl.zeros((BLOCK_V, SIZE), tl.float32)
    for first in range(0, room.to(tl.int32), SIZE):
        counted = (t_idx < length.to(tl.int32) - first)[:, None]
        k = tl.load(k_ptr + t_idx[:, None] * k_strides[0] + k_idx, mask=counted & k_mask, other=0.0)
        q = tl.load(q_ptr + t_idx[:, None] * q_strides[0] + k_idx, mask=counted & k_mask, other=0.0)
        if UPCAST:
            k, q = k.to(tl.float32), q.to(tl.float32)
        factors = factors_ptr + unit * 4 * SIZE + t_idx
        if CHANNEL_DECAY:
            sums = total_ptr + unit * SIZE * KEY_DIM
            total = tl.load(sums + t_idx[:, None] * KEY_DIM + k_idx, mask=k_mask, other=0.0)
            if DELTA:
                old = _product(state, tl.trans(k.to(tl.float32) * tl.exp(total)), zeros, PRECISION)
            o = _product(state, tl.trans(q.to(tl.float32) * tl.exp(total)), zeros, PRECISION)
        elif DELTA:
            old, o = _two_products(state, tl.trans(k), tl.trans(q), PRECISION)
        else:
            o = _product(state, tl.trans(q), zeros, PRECISION)
        if DELTA:
            old *= tl.load(factors)[None, :]
        o *= tl.load(factors + SIZE)[None, :]
        v = tl.load(v_ptr + t_idx[:, None] * v_strides[0] + v_idx[None, :], mask=counted & v_mask[None, :], other=0.0)
        v = tl.trans(v).to(tl.float32)
        if DELTA:
            high, low = _load_parts(mixing_ptr + unit * PLACES, SIZE, PAIR)
            new = _square_product(v - old, high, low, zeros, PRECISION, PAIR)
        else:
            new = v * tl.load(factors + 3 * SIZE)[None, :]
        high, low = _load_parts(scores_ptr + unit * PLACES, SIZE, PAIR)
        o = _square_product(new, high, low, o, PRECISION, PAIR)
        if skip_ptr is not None:
            o += tl.load(skip_ptr + head).to(tl.float32) * v
        o_mask = v_mask[:, None] & (t_idx < room.to(tl.int32) - first)[None, :]
        o_places = o_ptr + t_idx[None, :] * heads * VALUE_DIM + v_idx[:, None]
        tl.store(o_places, o.to(o_ptr.dtype.element_ty), mask=o_mask)
        new *= tl.load(factors + (0 if CHANNEL_DECAY else 2 * SIZE))[None, :]
        if CHANNEL_DECAY:  # keys and sums once more: in registers there is no room for them meanwhile
            last = tl.load(sums + (SIZE - 1) * KEY_DIM + k_idx, mask=k_mask, other=0.0)
            total = tl.load(sums + t_idx[:, None] * KEY_DIM + k_idx, mask=k_mask, other=0.0)
            k = tl.load(k_ptr + t_idx[:, None] * k_strides[0] + k_idx, mask=counted & k_mask, other=0.0)
            k = k.to(tl.float32) * tl.exp(last - total)
        else:
            last = tl.load(total_ptr + unit)
        state = _product(new, k, state * tl.exp(last), PRECISION)
        unit += heads
        q_ptr += SIZE * q_strides[0].to(tl.int64)
        k_ptr += SIZE * k_strides[0].to(tl.int64)
        v_ptr += SIZE * v_strides[0].to(tl.int64)
        o_ptr += SIZE * heads * VALUE_DIM
    kept = (k_idx < tl.where(length > 0, KEY_DIM, 0)) & v_mask[:, None]
    tl.store(written_ptr + into * state_strides[0] + places, state, mask=kept)


def linear_attention_prompt(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, skip=None, dtype=None
):
    """Same arguments and result as the reference."""
    batch, tokens, key_heads, repeat, value_dim = v.shape
    heads, key_dim, count = key_heads * repeat, k.shape[-1], sequences.number
    out = empty_output(v, (batch, tokens, heads, value_dim), sequences, dtype)
    q, k, v, a = (t.flatten(0, 1) for t in (q, k, v, a))  # views wherever they can be
    b = None if b is None else b.flatten(0, 1)
    chunks = cdiv(sequences.longest or tokens, CHUNK)
    channel_decay, delta = decay.bias.dim() == 2, b is not None
    units = (batch * tokens // CHUNK + count) * heads
    # Products of parts in bfloat16 have 16 bits, more than results of 16 bits show; those of float32 have 22.
    pair = q.dtype != torch.float32 and not interpreted()
    precision = "bf16x3" if pair else "ieee" if interpreted() else "tf32x3"
    squares = (units, 2 if pair else 1, CHUNK, CHUNK)
    scores, mixing = (
        state.new_empty(squares, dtype=torch.bfloat16 if pair else torch.float32) if there else None
        for there in (True, delta)
    )
    factors = state.new_empty(units, 4, CHUNK)
    total = state.new_empty(units, CHUNK * key_dim if channel_decay else 1)
    where = (*sequences.pointers(), tokens, mixing, scores, factors, total, heads, sequences.padded)
    block_k, block_v = max(16, power_of_two(key_dim)), 128 if channel_decay and value_dim > 64 else 64
    launch(
        chunk_products_kernel, (heads, chunks, count),
        q, k, a, b, *(() if t is None else t.stride() for t in (q, k, a, b)), decay.a_log, decay.bias,
        decay.lower_bound, *decay.limits, beta_scale, scale, key_eps, sequences.limited, *where,
        key_dim, repeat, block_k, CHUNK, channel_decay, decay.rounded, precision, pair, upcast(q.dtype),
        num_warps=8 if channel_decay else 4,
    )  # fmt: skip
    launch(
        chunk_states_kernel, (cdiv(value_dim, block_v), heads, count),
        q, k, v, out, q.stride(), k.stride(), v.stride(), state, state.stride(), skip, *where,
        key_dim, value_dim, repeat, block_k, block_v, CHUNK, channel_decay, delta, precision, pair,
        upcast(q.dtype), num_warps=block_v // 16 if block_k <= 128 and has(q.device, Feature.SHARED_OPERANDS) else 8,
        num_stages=2 if pair and block_k <= 128 and not channel_decay and shared_memory(q.device) >= TWO_STAGES else 1,
    )  # fmt: skip
    return out
