"""Causal convolution of each channel: a program a block of tokens and channels, all taps from memory."""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.kv import FIRSTS, HALF, LAYERS, STATE, WINDOW
from accel_kernels.attention.paged.store_triton import AT_LENGTH, OF_EACH, stored_at
from accel_kernels.device import programmatic
from accel_kernels.recurrent.gates_triton import after_taps
from accel_kernels.recurrent.recurrence import RowSequences, Sequences
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

# Places in `metadata`, as kernels may read them.
AT_FIRSTS, AT_HALF, AT_STATE, AT_WINDOW = (tl.constexpr(i) for i in (FIRSTS, HALF, LAYERS + STATE, LAYERS + WINDOW))


@triton.jit
def sequence_of(
    spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, tokens, sequence, PADDED: tl.constexpr
):  # fmt: skip
    """Of a sequence: first token that counts, tokens from there on, those of them that count, and slot.

    Then the position of the first one, that at which nothing has been before, and the slot to write. Of an idle one no
    token counts.

    The first arguments but for the layer are `pointers` of `Sequences` or `RowSequences`.
    """
    if slots_ptr is not None:
        if spans_ptr is None:
            begin = (sequence * tokens).to(tl.int64)
            end = begin + tokens
        else:
            begin = tl.load(spans_ptr + 2 * sequence).to(tl.int64)
            end = tl.load(spans_ptr + 2 * sequence + 1).to(tl.int64)
        slot = tl.load(slots_ptr + 2 * sequence).to(tl.int64)
        into = tl.load(slots_ptr + 2 * sequence + 1).to(tl.int64)
        position = tl.load(positions_ptr + sequence).to(tl.int64)
        room = end - begin
        length = tl.where(slot < 0, 0, room)
        first = position * 0
    else:
        slot = sequence.to(tl.int64)
        into = slot
        begin = slot * tokens
        position = tl.load(metadata_ptr + AT_LENGTH)
        first = position * 0
        room = first + tokens
        length = room
        if last_ptr is not None:
            length = tl.minimum(length, tl.load(last_ptr) + 1)
        if PADDED:
            firsts = tl.load(metadata_ptr + AT_FIRSTS)
            first = tl.load(firsts.to(tl.pointer_type(tl.int64)) + slot, mask=firsts != 0, other=0)
            before = tl.minimum(tl.maximum(first - position, 0), tokens)
            begin += before
            position += before
            room -= before
            length -= before
        length = tl.maximum(length, 0)
    return begin, room, length, slot, position, first, into


@triton.jit
def pools_at(metadata_ptr, layer, pool_ptr, PLACE: tl.constexpr):
    """The states or windows of a layer that are read, and those that are written, where metadata says that they are.

    PLACE: AT_STATE or AT_WINDOW, of the first half; those of the second are two further.
    """
    read_ptr, written_ptr = pool_ptr, pool_ptr
    if metadata_ptr is not None:
        half = 2 * tl.load(metadata_ptr + AT_HALF)
        place = PLACE + OF_EACH * layer
        read_ptr = stored_at(metadata_ptr, place + half, pool_ptr.dtype.element_ty)
        written_ptr = stored_at(metadata_ptr, place + 2 - half, pool_ptr.dtype.element_ty)
    return read_ptr, written_ptr


@triton.jit
def _inputs(x_ptr, before_ptr, row, x_row, before_row, c_idx, mask):
    """Tokens of these rows, times their gate."""
    x = tl.load(x_ptr + row * x_row + c_idx, mask=mask, other=0.0)
    if before_ptr is not None:
        gate = tl.load(before_ptr + row * before_row + c_idx, mask=mask, other=0.0)
        x = (x.to(tl.float32) * gate.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _taps_before(
    total, window_ptr, weight_ptr, weight_strides, position, first, channels, there, c_idx, TAPS: tl.constexpr
):
    """total and what the window adds to it for a token at `position`. there: channels, or 0 of an idle sequence."""
    for tap in tl.static_range(TAPS - 1):
        before = position + tap - (TAPS - 1)
        stored = c_idx < tl.where(before >= first, there, 0)
        x = tl.load(window_ptr + before % TAPS * channels + c_idx, mask=stored, other=0.0)
        weight = tl.load(
            weight_ptr + c_idx * weight_strides[0] + tap * weight_strides[1], mask=c_idx < there, other=0.0
        )
        total += x.to(tl.float32) * weight.to(tl.float32)
    return total


@triton.jit(do_not_specialize=("layer", "tokens"))
def causal_convolution_kernel(
    x_ptr, before_ptr, after_ptr, x_row, before_row, after_row, weight_ptr, weight_strides, bias_ptr, window_ptr, y_ptr,
    spans_ptr, slots_ptr, positions_ptr, metadata_ptr, layer, last_ptr, tokens, channels, PADDED: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of a sequence's first tokens reads its window, and then writes it.

    One token's window, of a row, is read before the kernel in front has ended, see `RowStates`.
    """
    sequence = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and slots_ptr is not None:
        tl.extra.cuda.gdc_wait()
    begin, room, length, slot, position, first, into = sequence_of(
        spans_ptr, slots_ptr, positions_ptr, metadata_ptr, last_ptr, tokens, sequence, PADDED
    )
    if BLOCK_T > 1:  # spans are shorter than all tokens together
        if tl.program_id(0) * BLOCK_T >= room:
            return
    window_ptr, written_ptr = pools_at(metadata_ptr, layer, window_ptr, AT_WINDOW)
    t_idx = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    c_idx = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    inside = c_idx < channels
    mask = (t_idx < length) & inside
    window_ptr += slot * TAPS * channels
    written_ptr += into * TAPS * channels
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if BLOCK_T == 1:
        there = tl.where(length > 0, channels, 0)
        total = _taps_before(
            total, window_ptr, weight_ptr, weight_strides, position, first, channels, there, c_idx, TAPS
        )
    if PDL and slots_ptr is None:
        tl.extra.cuda.gdc_wait()
    for tap in tl.static_range(TAPS - 1 if BLOCK_T == 1 else 0, TAPS):
        at = t_idx + tap - (TAPS - 1)
        x = _inputs(x_ptr, before_ptr, begin + at, x_row, before_row, c_idx, mask & (at >= 0)).to(tl.float32)
        if tap < TAPS - 1:
            before = position + at
            stored = mask & (at < 0) & (before >= first)
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
        tl.store(written_ptr + (position + last) % TAPS * channels + c_idx, newest, mask=kept)
        past = position + last  # what is older goes there too
        place = past % TAPS
        oldest = tl.where(length > 0, length - TAPS, length)  # of a row without tokens none
        kept = inside & (last < 0) & (last >= oldest) & (past >= first)
        older = tl.load(window_ptr + place * channels + c_idx, mask=kept, other=0.0)
        tl.store(written_ptr + place * channels + c_idx, older, mask=kept)


def rows_of(t: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """(B, T, ...) as tokens one after the other, evenly spaced, and how far they are apart."""
    if t is None:
        return None, 0
    rows = t.flatten(0, 1)  # a view wherever it can be
    return rows, rows.stride(0)


def empty_output(
    like: torch.Tensor, shape: tuple, sequences: Sequences | RowSequences, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Memory for the result, of which kernels write the tokens of sequences from the first that counts on."""
    whole = sequences.spans is None and not sequences.padded
    return like.new_empty(shape, dtype=dtype) if whole else like.new_zeros(shape, dtype=dtype)


def causal_convolution(x, weight, window, sequences, *, bias=None, activation=None, before=None, after=None):
    """Same arguments and result as the reference; window contiguous."""
    tokens, channels = x.shape[1:]
    y = empty_output(x, x.shape, sequences)
    (x, x_row), (before, before_row), (after, after_row) = map(rows_of, (x, before, after))
    longest = sequences.longest or tokens
    block_t = min(32, power_of_two(longest))
    block_c = min(power_of_two(channels), 2048 // block_t if block_t > 1 else 256)
    launch(
        causal_convolution_kernel, (cdiv(longest, block_t), cdiv(channels, block_c), sequences.number),
        x, before, after, x_row, before_row, after_row, weight, weight.stride(), bias, window, y,
        *sequences.pointers(), tokens, channels, sequences.padded, weight.shape[1],
        power_of_two(weight.shape[1]), activation, block_t, block_c,
        num_warps=4 if block_t > 1 else 2, **programmatic(x.device, longest == 1),
    )  # fmt: skip
    return y
