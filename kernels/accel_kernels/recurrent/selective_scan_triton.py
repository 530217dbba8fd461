"""Mamba-1's scan: a program a sequence and some channels, whose states it holds in registers, token after token."""

import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.elementwise.activations_triton import softplus
from accel_kernels.norm.norm import kernel_arguments
from accel_kernels.recurrent.causal_convolution_triton import AT_STATE, empty_output, pools_at, rows_of, sequence_of
from accel_kernels.recurrent.selective_scan import Widening
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch


@triton.jit
def _normed(x, weight_ptr, eps, idx, mask, size, NORM: tl.constexpr, kind: tl.constexpr):
    """The RMSNorm of a vector of `size` numbers, in fp32, rounded to `kind`."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + idx, mask=mask, other=0.0).to(tl.float32)
        x = x.to(kind).to(tl.float32)
    return x


@triton.jit(do_not_specialize=("layer", "tokens"))
def selective_scan_kernel(
    x_ptr, dt_ptr, k_ptr, q_ptr, gate_ptr, y_ptr, x_row, dt_row, k_row, q_row, gate_row, a_log_ptr, bias_ptr, skip_ptr,
    state_ptr, slot_stride, spans_ptr, slots_ptr, positions_ptr, metadata_ptr, layer, last_ptr, tokens, channels,
    time_ptr, dt_norm, k_norm, q_norm, PADDED: tl.constexpr, CHANNEL_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr,
    SIZE: tl.constexpr, RANK: tl.constexpr, NORMS: tl.constexpr, ANEW: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The next token is loaded while this one is computed. A single one's step may be widened here, by time_ptr.

    NORMS: whether there is one of dt, of k and of q.

    States of rows are read before the kernel in front has ended, see `RowStates`.
    """
    c_idx = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    n_idx = tl.arange(0, BLOCK_N)
    c_mask, n_mask = c_idx < channels, n_idx < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    whole = c_mask[:, None] & n_mask[None, :]
    rate = -tl.exp(tl.load(a_log_ptr + c_idx[:, None] * SIZE + n_idx[None, :], mask=whole, other=0.0).to(tl.float32))
    bias = tl.zeros((BLOCK_C,), tl.float32)
    skip = tl.zeros((BLOCK_C,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(dt_ptr.dtype.element_ty).to(tl.float32)
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    r_idx = tl.arange(0, BLOCK_R)
    r_mask = r_idx < RANK
    if time_ptr is not None:
        time = tl.load(
            time_ptr + c_idx[:, None] * RANK + r_idx[None, :], mask=c_mask[:, None] & r_mask[None, :], other=0.0
        )
    if PDL and slots_ptr is not None:
        tl.extra.cuda.gdc_wait()
    begin, room, length, slot, position, first, into = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, tokens, tl.program_id(1), PADDED
    )
    state_ptr, written_ptr = pools_at(metadata_ptr, layer, state_ptr, AT_STATE)
    places = c_idx[:, None] * CHANNEL_STRIDE + n_idx[None, :] * STATE_STRIDE
    stored = (c_idx < tl.where((length > 0) & (position > first) & (not ANEW), channels, 0))[:, None] & n_mask[None, :]
    state = tl.load(state_ptr + slot * slot_stride + places, mask=stored, other=0.0)
    if PDL and slots_ptr is None:
        tl.extra.cuda.gdc_wait()
    x_ptr += begin * x_row + c_idx
    dt_ptr += begin * dt_row
    k_ptr += begin * k_row + n_idx
    q_ptr += begin * q_row + n_idx
    y_ptr += begin * channels + c_idx
    if gate_ptr is not None:
        gate_ptr += begin * gate_row + c_idx
    kind: tl.constexpr = dt_ptr.dtype.element_ty
    now = c_idx < tl.where(length > 0, channels, 0)
    x = tl.load(x_ptr, mask=now, other=0.0)
    if time_ptr is None:
        dt_ptr += c_idx
        dt = tl.load(dt_ptr, mask=now, other=0.0)
    else:
        here = r_idx < tl.where(length > 0, RANK, 0)
        narrow = tl.load(dt_ptr + r_idx, mask=here, other=0.0).to(tl.float32)
        narrow = _normed(narrow, dt_norm.weight, dt_norm.eps, r_idx, r_mask, RANK, NORMS[0], kind)
        dt = tl.sum(time.to(tl.float32) * narrow[None, :], axis=1).to(kind)
    for token in range(0, length.to(tl.int32)):
        k = tl.load(k_ptr, mask=n_mask, other=0.0).to(tl.float32)
        q = tl.load(q_ptr, mask=n_mask, other=0.0).to(tl.float32)
        k = _normed(k, k_norm.weight, k_norm.eps, n_idx, n_mask, SIZE, NORMS[1], kind)
        q = _normed(q, q_norm.weight, q_norm.eps, n_idx, n_mask, SIZE, NORMS[2], kind)
        this_x, this_dt = x.to(tl.float32), dt.to(tl.float32)
        if time_ptr is None:
            x_ptr += x_row
            dt_ptr += dt_row
            then = c_idx < tl.where(token + 1 < length, channels, 0)
            x = tl.load(x_ptr, mask=then, other=0.0)
            dt = tl.load(dt_ptr, mask=then, other=0.0)
        step = softplus((this_dt + bias).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        state = state * tl.exp(rate * step[:, None]) + (step * this_x)[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], axis=1) + skip * this_x
        if gate_ptr is not None:
            gate = tl.load(gate_ptr, mask=c_mask, other=0.0).to(tl.float32)
            y *= gate / (1.0 + tl.exp(-gate))
            gate_ptr += gate_row
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty), mask=c_mask)
        k_ptr += k_row
        q_ptr += q_row
        y_ptr += channels
    for _ in range(length.to(tl.int32), room.to(tl.int32)):  # that do not count
        tl.store(y_ptr, tl.zeros((BLOCK_C,), tl.float32).to(y_ptr.dtype.element_ty), mask=c_mask)
        y_ptr += channels
    kept = (c_idx < tl.where(length > 0, channels, 0))[:, None] & n_mask[None, :]
    tl.store(written_ptr + into * slot_stride + places, state, mask=kept)


def selective_scan(
    x, dt, a_log, k, q, state, sequences, *, bias=None, skip=None, gate=None, anew=False, widening=None
):  # fmt: skip
    """Same arguments and result as the reference."""
    tokens, channels = x.shape[1:]
    y = empty_output(x, x.shape, sequences)
    rows = [rows_of(t) for t in (x, dt, k, q, gate)]
    size = k.shape[-1]
    time, beside = Widening() if widening is None else widening
    rank = 1 if time is None else time.shape[1]
    block_n, block_r = power_of_two(size), power_of_two(rank)
    block_c = max(1, min(power_of_two(channels), 512 // block_n, 8192 // block_r))
    launch(
        selective_scan_kernel, (cdiv(channels, block_c), sequences.number),
        *(row[0] for row in rows), y, *(row[1] for row in rows), a_log, bias, skip, state, state.stride(0),
        *sequences.pointers(), tokens, channels, time, *(kernel_arguments(one)[0] for one in beside),
        sequences.padded, *state.stride()[1:], size, rank, tuple(one is not None for one in beside), anew,
        block_c, block_n, block_r, num_warps=1 if time is None else 4, **programmatic(x.device, tokens == 1),
    )  # fmt: skip
    return y
