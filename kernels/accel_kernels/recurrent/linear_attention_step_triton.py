"""One token of linear attention: a program a row and value head, whose state it holds in registers."""

import triton
import triton.language as tl

from accel_kernels.device import multiprocessors, programmatic
from accel_kernels.recurrent.causal_convolution_triton import AT_STATE, AT_WINDOW, pools_at, sequence_of
from accel_kernels.recurrent.gates_triton import beta_gate, convolved, decay_gate, past_taps
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

NORM_OFF = (None, None, 0.0, None, False)
CONVOLUTION_OFF = (None, None, None, None, "qkv")


@triton.jit
def _row(ptr, strides, row, head, repeated):
    """Where a row's value head is in v, a, b or a gate: (B, key heads, repeat, ...)."""
    return ptr + row * strides[0] + head * strides[1] + repeated * strides[2]


@triton.jit(do_not_specialize=("layer",))
def linear_attention_step_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, gate_ptr, o_ptr, q_strides, k_strides, v_strides, a_strides, b_strides,
    gate_strides, state_ptr, slot_stride, head_stride, spans_ptr, slots_ptr, positions_ptr, metadata_ptr, layer,
    last_ptr, weight_ptr, weight_strides, bias_ptr, window_ptr, q_first, k_first, v_first, channels, a_log_ptr,
    decay_bias_ptr, lower_bound, low, high, beta_scale,
    skip_ptr, norm_ptr, eps, scale, key_eps, key_heads, PADDED: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, REPEAT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr, CHANNEL_DECAY: tl.constexpr, ROUND_DECAY: tl.constexpr, SILU: tl.constexpr,
    ROUND_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the value heads of a key head, and of the blocks of a head, the first ones keep what is theirs in common.

    State and window of a row are read before the kernel in front has ended, see `RowStates`.
    """
    row = (tl.program_id(0) // (key_heads * REPEAT)).to(tl.int64)
    head = tl.program_id(0) % (key_heads * REPEAT)
    key_head, repeated = head // REPEAT, head % REPEAT
    k_idx = tl.arange(0, BLOCK_K)
    v_idx = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_mask, v_mask = k_idx < KEY_DIM, v_idx < VALUE_DIM
    DELTA: tl.constexpr = b_ptr is not None
    kind: tl.constexpr = o_ptr.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + v_idx, mask=v_mask, other=0.0).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    if CHANNEL_DECAY:
        bias = tl.load(decay_bias_ptr + head * KEY_DIM + k_idx, mask=k_mask, other=0.0).to(tl.float32)
    else:
        bias = tl.load(decay_bias_ptr + head).to(tl.float32)
    if PDL and slots_ptr is not None:
        tl.extra.cuda.gdc_wait()
    _, _, length, slot, position, first, into = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, 1, row, PADDED
    )
    o_ptr += (row * key_heads * REPEAT + head) * VALUE_DIM
    if length <= 0:
        if PDL and slots_ptr is None:
            tl.extra.cuda.gdc_wait()
        tl.store(o_ptr + v_idx, tl.zeros((BLOCK_V,), tl.float32).to(kind), mask=v_mask)
        return
    state_ptr, written_ptr = pools_at(metadata_ptr, layer, state_ptr, AT_STATE)
    state_ptr += slot * slot_stride
    written_ptr += into * slot_stride
    kept_ptr = window_ptr
    if window_ptr is not None:
        window_ptr, kept_ptr = pools_at(metadata_ptr, layer, window_ptr, AT_WINDOW)
        window_ptr += slot * TAPS * channels
        kept_ptr += into * TAPS * channels
    q_ptr += row * q_strides[0] + key_head * q_strides[1]
    k_ptr += row * k_strides[0] + key_head * k_strides[1]
    v_ptr = _row(v_ptr, v_strides, row, key_head, repeated)
    q_taps, q_weights, q_bias, q_places, q_kept = past_taps(
        q_ptr, k_idx, k_mask, window_ptr, kept_ptr, weight_ptr, weight_strides, bias_ptr,
        q_first + key_head * KEY_DIM, position, first, channels, TAPS, BLOCK_TAPS,
    )  # fmt: skip
    k_taps, k_weights, k_bias, k_places, k_kept = past_taps(
        k_ptr, k_idx, k_mask, window_ptr, kept_ptr, weight_ptr, weight_strides, bias_ptr,
        k_first + key_head * KEY_DIM, position, first, channels, TAPS, BLOCK_TAPS,
    )  # fmt: skip
    v_taps, v_weights, v_bias, v_places, v_kept = past_taps(
        v_ptr, v_idx, v_mask, window_ptr, kept_ptr, weight_ptr, weight_strides, bias_ptr,
        v_first + head * VALUE_DIM, position, first, channels, TAPS, BLOCK_TAPS,
    )  # fmt: skip
    places = head * head_stride + k_idx[:, None] * KEY_STRIDE + v_idx[None, :] * VALUE_STRIDE
    whole = k_mask[:, None] & v_mask[None, :]
    stored = whole & (k_idx < tl.where(position > first, KEY_DIM, 0))[:, None]
    if slots_ptr is None:
        state = tl.load(state_ptr + places, mask=stored, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
    q_new = tl.load(q_ptr + k_idx, mask=k_mask, other=0.0)
    k_new = tl.load(k_ptr + k_idx, mask=k_mask, other=0.0)
    v_new = tl.load(v_ptr + v_idx, mask=v_mask, other=0.0)
    a_ptr = _row(a_ptr, a_strides, row, key_head, repeated)
    if CHANNEL_DECAY:
        a = tl.load(a_ptr + k_idx, mask=k_mask, other=0.0)
    else:
        a = tl.load(a_ptr)
    if DELTA:
        b = tl.load(_row(b_ptr, b_strides, row, key_head, repeated))
    if norm_ptr is not None:
        gate_ptr = _row(gate_ptr, gate_strides, row, key_head, repeated)
        gate = tl.load(gate_ptr + v_idx, mask=v_mask, other=0.0).to(tl.float32)
    if slots_ptr is not None:  # the last of all large loads, whose layout Triton therefore gives to what follows
        state = tl.load(state_ptr + places, mask=stored, other=0.0)

    inputs: tl.constexpr = q_ptr.dtype.element_ty
    q, q_taps = convolved(q_taps, q_weights, q_bias, q_new, weight_ptr, inputs, ACTIVATION, TAPS)
    k, k_taps = convolved(k_taps, k_weights, k_bias, k_new, weight_ptr, inputs, ACTIVATION, TAPS)
    v, v_taps = convolved(v_taps, v_weights, v_bias, v_new, weight_ptr, inputs, ACTIVATION, TAPS)
    if window_ptr is not None:
        shared = (k_idx < tl.where(repeated + tl.program_id(1) == 0, KEY_DIM, 0))[None, :]
        tl.store(q_places, q_taps.to(inputs), mask=q_kept & shared)
        tl.store(k_places, k_taps.to(inputs), mask=k_kept & shared)
        tl.store(v_places, v_taps.to(inputs), mask=v_kept)
    if key_eps is not None:
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + key_eps)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + key_eps)
    q *= scale
    g, strength = decay_gate(a, a_log, bias, lower_bound, low, high, ROUND_DECAY, DELTA)
    if CHANNEL_DECAY:
        state *= tl.exp(g)[:, None]
    else:
        state *= tl.exp(g)
    if DELTA:
        strength = beta_gate(b, beta_scale)
        new = (v - tl.sum(state * k[:, None], axis=0)) * strength
    else:
        new = v * strength
    state += k[:, None] * new[None, :]
    tl.store(written_ptr + places, state, mask=whole)
    o = tl.sum(state * q[:, None], axis=0)
    if skip_ptr is not None:
        o += skip * v
    if norm_ptr is not None:
        o = o.to(kind).to(tl.float32)
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / VALUE_DIM + eps)
        if ROUND_NORM:
            o = o.to(kind).to(tl.float32) * weight
            if kind == norm_ptr.dtype.element_ty:
                o = o.to(kind).to(tl.float32)
        else:
            o *= weight
        factor = 1.0 / (1.0 + tl.exp(-gate))
        o *= gate * factor if SILU else factor
    tl.store(o_ptr + v_idx, o.to(kind), mask=v_mask)


def linear_attention_step(
    q, k, v, a, decay, state, sequences, *, scale, b=None, beta_scale=1.0, key_eps=None, convolution=None, skip=None,
    norm=None, dtype=None,
):  # fmt: skip
    """Same arguments and result as the reference."""
    rows, key_heads, repeat, value_dim = v.shape
    key_dim = k.shape[-1]
    out = v.new_empty(rows, key_heads * repeat * value_dim, dtype=dtype)
    weight, window, bias, activation, order = convolution or CONVOLUTION_OFF
    gate, norm_weight, eps, gate_activation, round_norm = norm or NORM_OFF
    keys, values = key_heads * key_dim, key_heads * repeat * value_dim
    taps = 1 if weight is None else weight.shape[1]
    firsts = (0, keys, 2 * keys) if order == "qkv" else (values + keys, values, 0)
    block_k, block_v = (max(16, power_of_two(size)) for size in (key_dim, value_dim))
    few = rows * key_heads * repeat < 2 * multiprocessors(q.device)
    if norm is None:
        block_v = min(block_v, max(16, (2048 if few else 8192) // block_k))
    launch(
        linear_attention_step_kernel, (rows * key_heads * repeat, cdiv(value_dim, block_v)),
        q, k, v, a, b, gate, out, *(() if t is None else t.stride() for t in (q, k, v, a, b, gate)),
        state, *state.stride()[:2], *sequences.pointers(), weight,
        () if weight is None else weight.stride(), bias, window, *firsts,
        2 * keys + values, decay.a_log, decay.bias, decay.lower_bound, *decay.limits, beta_scale, skip,
        norm_weight, eps, scale, key_eps, key_heads, sequences.padded, *state.stride()[2:],
        key_dim, value_dim, repeat, block_k, block_v, taps, power_of_two(taps), activation,
        decay.bias.dim() == 2, decay.rounded, gate_activation == "silu", round_norm,
        num_warps=max(1, min(16, block_k * block_v // (4096 if few else 2048))), maxnreg=255 if few else 128,
        **programmatic(q.device),
    )  # fmt: skip
    return out
