"""GroupNorm over NHWC: stats of every channel in chunks of rows, merged by group, then one pass that normalizes.

One program a (batch, group) would leave half of a large GPU idle. So the two passes over the image know nothing of
groups: the first writes mean and sum of squared deviations of each channel and chunk. A small kernel merges these
(Chan, Golub and LeVeque, 1983), which loses no digits far from zero. Small images take one program a group.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.norm.channel_stats_triton import SINGLE_LIMIT, Chunks, block_channels, large
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch, warming_up

TILE = 4096  # elements a program loads at once
UNSPECIALIZED = (
    "has_add",
    "has_shift",
    "add_stride",
    "rows",
    "chunks",
    "chunk_rows",
)  # one kernel whatever divides them


@triton.jit
def _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, add_stride):
    extra = tl.zeros(c_idx.shape, tl.float32)
    if has_add:
        extra += tl.load(add_ptr + n * add_stride + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    if has_shift:
        extra += tl.load(shift_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    return extra


@triton.jit
def _affine(weight_ptr, bias_ptr, c_idx, c_mask):
    scale = tl.full(c_idx.shape, 1.0, tl.float32)
    offset = tl.zeros(c_idx.shape, tl.float32)
    if weight_ptr is not None:
        scale = tl.load(weight_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
        offset = tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit(do_not_specialize=UNSPECIALIZED)
def group_norm_single(
    x_ptr, y_ptr, weight_ptr, bias_ptr, add_ptr, shift_ptr, has_add, has_shift, add_stride, silu, rows, channels, eps,
    GROUP_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    c_idx = tl.program_id(0) * GROUP_SIZE + c
    c_mask = c < GROUP_SIZE
    r_idx = tl.arange(0, BLOCK_R)
    mask = (r_idx < rows)[:, None] & c_mask[None, :]
    place = n.to(tl.int64) * rows * channels + r_idx[:, None] * channels + c_idx[None, :]
    extra = _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, add_stride)
    scale, offset = _affine(weight_ptr, bias_ptr, c_idx, c_mask)
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) + extra[None, :]
    count = rows.to(tl.float32) * GROUP_SIZE
    mean = tl.sum(tl.sum(tl.where(mask, x, 0.0), axis=1), axis=0) / count
    deviation = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(deviation * deviation, axis=1), axis=0) / count + eps)
    y = deviation * (rstd * scale)[None, :] + offset[None, :]
    y = y * tl.where(silu, tl.sigmoid(y), 1.0)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def group_norm_channel_stats(
    x_ptr, stats_ptr, rows, channels, chunks, chunk_rows,
    EVEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    n = tl.program_id(2)
    c_idx = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = (c_idx >= 0) if EVEN else (c_idx < channels)
    row = chunk * chunk_rows
    row_end = tl.minimum(row + chunk_rows, rows)
    x_ptr += n.to(tl.int64) * rows * channels
    # Deviations from the chunk's first row, not from zero: sums of squares then keep their digits, and nothing has to
    # be reduced across threads before the end of the loop.
    pivot = tl.load(x_ptr + row.to(tl.int64) * channels + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for r in tl.range(row, row_end, BLOCK_R, num_stages=STAGES):
        r_idx = r + tl.arange(0, BLOCK_R)
        mask = (r_idx < row_end)[:, None] & c_mask[None, :]
        place = r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, x - pivot[None, :], 0.0)
        sums += deviation
        squares += deviation * deviation
    count = (row_end - row).to(tl.float32)
    shift = tl.sum(sums, axis=0) / count
    slot = (n * chunks + chunk) * 2 * channels + c_idx
    tl.store(stats_ptr + slot, pivot + shift, mask=c_mask)
    tl.store(stats_ptr + slot + channels, tl.sum(squares, axis=0) - shift * shift * count, mask=c_mask)


@triton.jit(do_not_specialize=(*UNSPECIALIZED, "GROUP_SIZE"))
def group_norm_merge(
    stats_ptr, table_ptr, weight_ptr, add_ptr, shift_ptr, has_add, has_shift, add_stride,
    rows, channels, chunks, chunk_rows, eps, GROUP_SIZE, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    c_idx = tl.program_id(0) * GROUP_SIZE + c
    c_mask = c < GROUP_SIZE
    extra = _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, add_stride)
    stats_ptr += n * chunks * 2 * channels
    total = rows.to(tl.float32) * GROUP_SIZE
    # A lane merges every BLOCK_K-th chunk of its channel, most often one: one trip to memory.
    counts = tl.zeros((BLOCK_K, 1), tl.float32)
    means = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_K, BLOCK_C), tl.float32)
    for first in range(0, chunks, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask = (k < chunks)[:, None] & c_mask[None, :]
        place = stats_ptr + k[:, None] * 2 * channels + c_idx[None, :]
        off = tl.load(place, mask=mask, other=0.0) - means
        m2 = tl.load(place + channels, mask=mask, other=0.0)
        more = tl.where(k < chunks, tl.minimum(rows - k * chunk_rows, chunk_rows), 0).to(tl.float32)[:, None]
        share = more / tl.maximum(counts + more, 1.0)
        squares += tl.where(mask, m2 + off * off * counts * share, 0.0)
        means += tl.where(mask, off * share, 0.0)
        counts += more
    means += extra[None, :]
    mean = tl.sum(tl.sum(tl.where(c_mask[None, :], means * counts, 0.0), axis=1), axis=0) / total
    squares += tl.where(c_mask[None, :], counts * (means - mean) * (means - mean), 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / total + eps)
    scale = extra * 0.0 + rstd
    if weight_ptr is not None:
        scale *= tl.load(weight_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    slot = n * 2 * channels + c_idx
    tl.store(table_ptr + slot, mean - extra, mask=c_mask)
    tl.store(table_ptr + slot + channels, scale, mask=c_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def group_norm_apply(
    x_ptr, y_ptr, table_ptr, bias_ptr, silu, rows, channels,
    EVEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(2)
    c_idx = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    c_mask = (c_idx >= 0) if EVEN else (c_idx < channels)
    center = tl.load(table_ptr + n * 2 * channels + c_idx, mask=c_mask, other=0.0)
    scale = tl.load(table_ptr + (n * 2 + 1) * channels + c_idx, mask=c_mask, other=0.0)
    r_idx = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (r_idx < rows)[:, None] & c_mask[None, :]
    place = n.to(tl.int64) * rows * channels + r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    y = (x - center[None, :]) * scale[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)[None, :]
    y = y * tl.where(silu, tl.sigmoid(y), 1.0)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def group_norm(x, num_groups, weight, bias, eps, *, add=None, shift=None, silu=False, channel_stats=None, dtype=None):
    """Same arguments as the reference; x channels-last, any batch, fp16, bf16 or fp32, stats in fp32.

    A warmup compiles what images of every size take.
    """
    batch, channels, height, width = x.shape
    rows, group_size = height * width, channels // num_groups
    y = torch.empty_like(x, dtype=dtype)
    # A missing addend is a flag and a pointer never read, and SiLU a flag, not kernels of their own to compile.
    addends = (x if add is None else add, x if shift is None else shift)
    flags = (add is not None, shift is not None, 0 if add is None else add.stride(0))

    every = warming_up()
    block_c = power_of_two(group_size)
    single = power_of_two(rows) * block_c <= SINGLE_LIMIT
    if single or every:
        launch(
            group_norm_single, (num_groups, batch),
            x, y, weight, bias, *addends, *flags, silu, rows, channels, eps, group_size,
            BLOCK_C=block_c, BLOCK_R=SINGLE_LIMIT // block_c, num_warps=16,
        )  # fmt: skip
    if single and not every:
        return y

    table = group_table(x, num_groups, weight, eps, addends, flags, channel_stats)
    for wide in large(rows):
        block_c = block_channels(channels, 256 if wide else 64)
        block_r = max(1, TILE // block_c)
        launch(
            group_norm_apply, (cdiv(rows, block_r), cdiv(channels, block_c), batch),
            x, y, table, bias, silu, rows, channels,
            EVEN=channels % block_c == 0, BLOCK_C=block_c, BLOCK_R=block_r, num_warps=8,
        )  # fmt: skip
    return y


def group_table(x, num_groups, weight, eps, addends, flags, channel_stats=None):
    """(N, 2, C) in fp32: what to take away from each channel of x, and what to multiply the rest by.

    x: (N, C, H, W) channels-last. addends: of a sample and of a channel, and flags which are there, see `group_norm`.
    channel_stats: of x, where they are known.
    """
    batch, channels, height, width = x.shape
    rows, group_size = height * width, channels // num_groups
    if channel_stats is not None and not warming_up():
        channel_stats, chunk_rows = channel_stats
    else:
        cut = Chunks.of(batch, channels, rows, x.device, block=64, tile=TILE, programs=4)
        chunk_rows = cut.rows
        channel_stats = torch.empty((batch, cut.number, 2, channels), device=x.device, dtype=torch.float32)
        for ahead in large(rows):
            launch(
                group_norm_channel_stats, (cut.number, cdiv(channels, cut.block_c), batch),
                x, channel_stats, rows, channels, cut.number, cut.rows,
                EVEN=channels % cut.block_c == 0, BLOCK_C=cut.block_c, BLOCK_R=cut.block_r,
                STAGES=3 if ahead else 1, num_warps=4,
            )  # fmt: skip
    table = torch.empty((batch, 2, channels), device=x.device, dtype=torch.float32)
    block_c, chunks = power_of_two(group_size), channel_stats.shape[1]
    launch(
        group_norm_merge, (num_groups, batch),
        channel_stats, table, weight, *addends, *flags, rows, channels, chunks, chunk_rows, eps, group_size,
        BLOCK_C=block_c, BLOCK_K=max(1, min(64, TILE // block_c)), num_warps=4,
    )  # fmt: skip
    return table
