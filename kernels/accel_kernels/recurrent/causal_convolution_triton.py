"""Causal convolution of each channel: a program a block of tokens and channels, all taps from memory."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import programmatic
from accel_kernels.recurrent.gates_triton import after_taps
from accel_kernels.recurrent.recurrence import Sequences
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch


@triton.jit
def sequence_of(spans_ptr, slots_ptr, positions_ptr, tokens, sequence):
    """First token, tokens, of them those that count, slot and position of a sequence. Of an idle one none counts."""
    if spans_ptr is None:
        begin = (sequence * tokens).to(tl.int64)
        end = begin + tokens
    else:
        begin = tl.load(spans_ptr + 2 * sequence).to(tl.int64)
        end = tl.load(spans_ptr + 2 * sequence + 1).to(tl.int64)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    length = end - begin
    return begin, length, tl.where(slot < 0, 0, length), slot, tl.load(positions_ptr + sequence).to(tl.int64)


@triton.jit
def _inputs(x_ptr, before_ptr, row, x_row, before_row, c_idx, mask):
    """Tokens of these rows, times their gate."""
    x = tl.load(x_ptr + row * x_row + c_idx, mask=mask, other=0.0)
    if before_ptr is not None:
        gate = tl.load(before_ptr + row * before_row + c_idx, mask=mask, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=("tokens",))
def causal_convolution_kernel(
    x_ptr, before_ptr, after_ptr, x_row, before_row, after_row, weight_ptr, weight_strides, bias_ptr, window_ptr, y_ptr,
    spans_ptr, slots_ptr, positions_ptr, tokens, channels, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of a sequence's first tokens reads its window, and then writes it."""
    sequence = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin, room, length, slot, position = sequence_of(spans_ptr, slots_ptr, positions_ptr, tokens, sequence)
    t_idx = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    c_idx = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    inside = c_idx < channels
    mask = (t_idx < length) & inside
    window_ptr += slot * TAPS * channels
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        at = t_idx + tap - (TAPS - 1)
        x = _inputs(x_ptr, before_ptr, begin + at, x_row, before_row, c_idx, mask & (at >= 0)).to(tl.float32)
        if tap < TAPS - 1:
            before = position + at
            stored = mask & (at < 0) & (before >= 0)
            x += tl.load(window_ptr + before % TAPS * channels + c_idx, mask=stored, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + c_idx * weight_strides[0] + tap * weight_strides[1], mask=inside, other=0.0)
        total += x * weight.to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + c_idx, mask=inside, other=0.0).to(tl.float32)
    y = after_taps(total, weight_ptr.dtype.element_ty, ACTIVATION).to(y_ptr.dtype.element_ty)
    if after_ptr is not None:
        gate = tl.load(after_ptr + (begin + t_idx) * after_row + c_idx, mask=mask, other=0.0)
        y = (y.to(tl.float32) * gate.to(tl.float32)).to(y.dtype)
    y = tl.where(mask, y, 0.0)
    tl.store(y_ptr + (begin + t_idx) * channels + c_idx, y, mask=(t_idx < room) & inside)
    if tl.program_id(0) == 0:
        tl.debug_barrier()  # all of its threads have read the window
        last = length - 1 - tl.arange(0, BLOCK_TAPS)[:, None]
        kept = inside & (last >= 0) & (last >= length - TAPS)
        newest = _inputs(x_ptr, before_ptr, begin + last, x_row, before_row, c_idx, kept)
        tl.store(window_ptr + (position + last) % TAPS * channels + c_idx, newest, mask=kept)


def rows_of(t: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """(B, T, ...) as tokens one after the other, evenly spaced, and how far they are apart."""
    if t is None:
        return None, 0
    rows = t.flatten(0, 1)  # a view wherever it can be
    return rows, rows.stride(0)


def empty_output(like: torch.Tensor, shape: tuple, sequences: Sequences) -> torch.Tensor:
    """Memory for the result, of which kernels write the tokens of sequences."""
    return like.new_empty(shape) if sequences.spans is None else like.new_zeros(shape)


def causal_convolution(x, weight, window, sequences, *, bias=None, activation=None, before=None, after=None):
    """Same arguments and result as the reference; window contiguous."""
    tokens, channels = x.shape[1:]
    y = empty_output(x, x.shape, sequences)
    (x, x_row), (before, before_row), (after, after_row) = map(rows_of, (x, before, after))
    longest = sequences.longest or tokens
    block_t = min(32, power_of_two(longest))
    block_c = min(power_of_two(channels), 2048 // block_t if block_t > 1 else 256)
    launch(
        causal_convolution_kernel, (cdiv(longest, block_t), cdiv(channels, block_c), len(sequences.slots)),
        x, before, after, x_row, before_row, after_row, weight, weight.stride(), bias, window, y,
        sequences.spans, sequences.slots, sequences.positions, tokens, channels, weight.shape[1],
        power_of_two(weight.shape[1]), activation, block_t, block_c,
        num_warps=4 if block_t > 1 else 2, **programmatic(x.device, longest == 1),
    )  # fmt: skip
    return y
