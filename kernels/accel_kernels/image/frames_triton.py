"""Frames for a convolution over video: a program some pixels of what is written, each from the pixel that it shows.

Where frames alone are added, rows of x and of y are the same ones, some further on. Else each pixel's place is worked
out.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.image.frames import NO_PADDING, FrameGroups, as_images
from accel_kernels.norm.channel_stats_triton import block_channels
from accel_kernels.norm.group_norm_triton import group_table
from accel_kernels.norm.norm import Norm
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

TILE, WARPS = 4096, 8
UNSPECIALIZED = (
    "has_shift", "silu", "x_stride", "earlier_stride", "rows", "frames", "height", "width", "earlier", "front", "back",
    "top", "left",
)  # fmt: skip


@triton.jit
def _clamped(index, size, REPEAT: tl.constexpr):
    return tl.minimum(tl.maximum(index, 0), size - 1) if REPEAT else index


@triton.jit(do_not_specialize=UNSPECIALIZED)
def frames_kernel(
    x_ptr, earlier_ptr, y_ptr, weight_ptr, bias_ptr, shift_ptr, table_ptr, has_shift, silu, x_stride, earlier_stride,
    rows, frames, height, width, earlier, front, back, top, left, channels, eps, offset,
    NORM: tl.constexpr, PER_FRAME: tl.constexpr, FLAT: tl.constexpr,
    REPEAT_FRAMES: tl.constexpr, REPEAT_EDGES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """rows: of y, for each sample. NORM: "none", "rms", "layer" or "groups"."""
    n = tl.program_id(2).to(tl.int64)
    c_idx = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = c_idx < channels
    r_idx = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if FLAT:
        row = r_idx - front * height * width  # among earlier frames, then those of x
        first = earlier * height * width
        inside = (r_idx < rows) & (row >= 0) & (row < first + frames * height * width)
        before = row < first
        x_row, earlier_row = row - first, row
        frame = x_row // (height * width) if PER_FRAME else x_row
    else:
        times = earlier + frames
        line, column = r_idx // (width + 2 * left), r_idx % (width + 2 * left)
        t = _clamped(line // (height + 2 * top) - front, times, REPEAT_FRAMES)
        h = _clamped(line % (height + 2 * top) - top, height, REPEAT_EDGES)
        w = _clamped(column - left, width, REPEAT_EDGES)
        inside = (r_idx < rows) & (t >= 0) & (t < times) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        before = t < earlier
        frame = t - earlier
        x_row = (frame * height + h) * width + w
        earlier_row = (t * height + h) * width + w
    now = (inside & (before == 0))[:, None] & c_mask[None, :]
    place = n * x_stride + x_row.to(tl.int64)[:, None] * channels + c_idx[None, :]
    y = tl.load(x_ptr + place, mask=now, other=0.0).to(tl.float32)
    if NORM == "groups":
        table_ptr += n * (frames if PER_FRAME else 1) * 2 * channels
        if PER_FRAME:
            place = frame.to(tl.int64)[:, None] * 2 * channels + c_idx[None, :]
            center = tl.load(table_ptr + place, mask=now, other=0.0)
            factor = tl.load(table_ptr + channels + place, mask=now, other=0.0)
        else:
            center = tl.load(table_ptr + c_idx, mask=c_mask, other=0.0)[None, :]
            factor = tl.load(table_ptr + channels + c_idx, mask=c_mask, other=0.0)[None, :]
        y = (y - center) * factor
    else:
        if has_shift:
            y += tl.load(shift_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
        if NORM != "none":
            if NORM == "layer":
                mean = tl.sum(y, axis=1) / channels
                y = tl.where(c_mask[None, :], y - mean[:, None], 0.0)
            y = y * tl.rsqrt(tl.sum(y * y, axis=1) / channels + eps)[:, None]
            if weight_ptr is not None:
                y *= (tl.load(weight_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32) + offset)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    if silu:
        y = y * tl.sigmoid(y)
    place = n * earlier_stride + earlier_row.to(tl.int64)[:, None] * channels + c_idx[None, :]
    old = tl.load(earlier_ptr + place, mask=(inside & before)[:, None] & c_mask[None, :], other=0.0)
    y = tl.where(now, y.to(y_ptr.dtype.element_ty), old)
    place = (n * rows + r_idx)[:, None] * channels + c_idx[None, :]
    tl.store(y_ptr + place, y, mask=(r_idx < rows)[:, None] & c_mask[None, :])


def convolution_frames(x, padding=NO_PADDING, norm=None, *, shift=None, silu=False, previous=None):
    """Same arguments and result as the reference; each sample channels-last, the result all of it."""
    n, channels, frames, height, width = x.shape
    earlier = 0 if previous is None else previous.shape[2]
    times = padding.front + earlier + frames + padding.back
    shape = (n, channels, times, height + 2 * padding.height, width + 2 * padding.width)
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=torch.channels_last_3d)
    rows = shape[2] * shape[3] * shape[4]
    kind, weight, bias, table, eps, offset = _normed(x, norm, shift)
    per_frame = isinstance(norm, FrameGroups) and norm.per_frame
    flat = not (padding.height or padding.width or padding.repeat_frames)
    together = kind in ("rms", "layer")
    block_c = power_of_two(channels) if together else block_channels(channels, 256)
    block_r = max(1, TILE // block_c)
    launch(
        frames_kernel, (cdiv(rows, block_r), cdiv(channels, block_c), n),
        x, x if previous is None else previous, y, weight, bias, x if shift is None else shift, table,
        shift is not None, silu, x.stride(0), 0 if previous is None else previous.stride(0),
        rows, frames, height, width, earlier, padding.front, padding.back, padding.height, padding.width,
        channels, eps, offset,
        kind, per_frame, flat, padding.repeat_frames, padding.repeat_edges,
        BLOCK_C=block_c, BLOCK_R=block_r, num_warps=WARPS,
    )  # fmt: skip
    return y


def _normed(x, norm, shift):
    """The kind of the norm, its weight and bias, the table of a group norm, eps, and the offset of the weight."""
    if norm is None:
        return "none", None, None, x, 0.0, 0.0
    if isinstance(norm, Norm):
        return "layer" if norm.centered else "rms", norm.weight, norm.bias, x, norm.eps, norm.offset
    addends, flags = (x, x if shift is None else shift), (False, shift is not None, 0)
    images = as_images(x, norm.per_frame)
    stats = None if norm.per_frame else norm.channel_stats
    table = group_table(images, norm.number, norm.weight, norm.eps, addends, flags, stats)
    return "groups", None, norm.bias, table, 0.0, 0.0
