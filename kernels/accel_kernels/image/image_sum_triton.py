"""One pass over an image that writes a sum, or a concatenation, and the stats of its channels in chunks of rows."""

import torch
import triton
import triton.language as tl

from accel_kernels.image.image_sum import sum_dtype
from accel_kernels.norm.channel_stats_triton import SINGLE_LIMIT, Chunks, large
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch, warming_up

WARPS = 4
GROUPS = 32  # of almost every norm; a norm with fewer computes channel stats itself
UNSPECIALIZED = ("has_bias", "rows", "chunks", "chunk_rows")


@triton.jit
def _value(x_ptr, other_ptr, r_idx, c_idx, mask, extra, channels, split, gain, inverse_scale, CONCAT: tl.constexpr):
    row = r_idx.to(tl.int64)[:, None]
    if CONCAT:
        left = (c_idx < split)[None, :]
        value = tl.load(x_ptr + row * split + c_idx[None, :], mask=mask & left, other=0.0).to(tl.float32)
        place = row * (channels - split) + (c_idx - split)[None, :]
        value += tl.load(other_ptr + place, mask=mask & (c_idx >= split)[None, :], other=0.0).to(tl.float32)
    else:
        place = row * channels + c_idx[None, :]
        value = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) * gain + extra[None, :]
        if other_ptr is not None:
            value += tl.load(other_ptr + place, mask=mask, other=0.0).to(tl.float32)
        value *= inverse_scale
    return value


@triton.jit(do_not_specialize=UNSPECIALIZED)
def image_sum_kernel(
    x_ptr, other_ptr, bias_ptr, y_ptr, stats_ptr, has_bias, rows, channels, split, chunks, chunk_rows, gain,
    inverse_scale, CONCAT: tl.constexpr, CHANNEL_STATS: tl.constexpr, EVEN: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    n = tl.program_id(2).to(tl.int64)
    c_idx = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = (c_idx >= 0) if EVEN else (c_idx < channels)
    extra = tl.zeros((BLOCK_C,), tl.float32)
    if has_bias:
        extra += tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    row = chunk * chunk_rows
    row_end = tl.minimum(row + chunk_rows, rows)
    x_ptr += n * rows * split
    if other_ptr is not None:
        other_ptr += n * rows * ((channels - split) if CONCAT else channels)
    y_ptr += n * rows * channels
    # Deviations from the chunk's first row, as in `group_norm_channel_stats`; of the values as they are stored.
    one = row + tl.arange(0, 1)
    pivot = _value(x_ptr, other_ptr, one, c_idx, c_mask[None, :], extra, channels, split, gain, inverse_scale, CONCAT)
    pivot = pivot.to(y_ptr.dtype.element_ty).to(tl.float32)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for r in tl.range(row, row_end, BLOCK_R, num_stages=3):
        r_idx = r + tl.arange(0, BLOCK_R)
        mask = (r_idx < row_end)[:, None] & c_mask[None, :]
        value = _value(x_ptr, other_ptr, r_idx, c_idx, mask, extra, channels, split, gain, inverse_scale, CONCAT)
        stored = value.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :], stored, mask=mask)
        if CHANNEL_STATS:
            deviation = tl.where(mask, stored.to(tl.float32) - pivot, 0.0)
            sums += deviation
            squares += deviation * deviation
    if CHANNEL_STATS:
        count = (row_end - row).to(tl.float32)
        shift = tl.sum(sums, axis=0) / count
        slot = stats_ptr + (n * chunks + chunk) * 2 * channels + c_idx
        tl.store(slot, tl.sum(pivot, axis=0) + shift, mask=c_mask)
        tl.store(slot + channels, tl.sum(squares, axis=0) - shift * shift * count, mask=c_mask)


def image_sum(x, residual=None, bias=None, scale=1.0, channel_stats=True, gain=1.0):
    """Same arguments as the reference, channels-last; returns the sum and its channel stats, as `_launch` does."""
    y = torch.empty_like(x, dtype=sum_dtype(x, residual))
    return y, _launch(x, residual, bias, y, x.shape[1], gain, 1.0 / scale, channel_stats, concat=False)


def image_concat(x, other):
    """Same arguments as the reference, channels-last; returns the concatenation and its channel stats."""
    n, channels, height, width = x.shape
    shape = (n, channels + other.shape[1], height, width)
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last)
    return y, _launch(x, other, None, y, channels, 1.0, 1.0, True, concat=True)


def _launch(x, other, bias, y, split, gain, inverse_scale, with_channel_stats, concat):
    """The channel stats, (N, chunks, 2, C) in fp32, with the rows of a chunk; None where no norm wants them."""
    n, channels, height, width = y.shape
    rows = height * width
    small = rows * power_of_two(cdiv(channels, GROUPS)) <= SINGLE_LIMIT  # and so normalized without them
    kinds = [(with_channel_stats and (warming_up() or not small), wide) for wide in large(rows)]
    if warming_up():
        kinds.append((False, False))
    for stats, wide in kinds:
        block, tile, programs = (128, 4096, 8) if wide else (64, 2048, 2)
        cut = Chunks.of(n, channels, rows, y.device, block, tile, programs if stats else rows)
        channel_stats = y  # a pointer never written
        if stats:
            channel_stats = torch.empty((n, cut.number, 2, channels), device=y.device, dtype=torch.float32)
        launch(
            image_sum_kernel, (cut.number, cdiv(channels, cut.block_c), n),
            x, other, x if bias is None else bias, y, channel_stats, bias is not None,
            rows, channels, split, cut.number, cut.rows, gain, inverse_scale,
            CONCAT=concat, CHANNEL_STATS=stats, EVEN=channels % cut.block_c == 0,
            BLOCK_C=cut.block_c, BLOCK_R=cut.block_r, num_warps=WARPS,
        )  # fmt: skip
    return (channel_stats, cut.rows) if stats else None
