"""GroupNorm over NHWC: moments and normalisation, split over row chunks and blocks of groups.

One program a (batch, group), the usual mapping, gives 64 programs for a batch of 2 and leaves half of a large GPU idle.
Here rows are cut into chunks as well; each chunk writes its mean and sum of squared deviations per group, and the
second kernel merges them (Chan, Golub and LeVeque, 1983), which loses no digits where the mean is far from zero. Small
images take one program a group, which holds the group in registers.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.launch import floor_power_of_two, multiprocessors, power_of_two

TILE = 4096  # elements a program loads at once
SINGLE_LIMIT = 16384  # padded elements of a group up to which one program holds it whole
PROGRAMS_PER_SM = 4
LARGE_ROWS = 16384  # from here on, memory and not latency decides: wider rows, more warps (measured on an H200)
LEAST_CHUNKS = 64  # padded number of partial moments: one compiled kernel for all images up to that many
UNSPECIALISED = (
    "has_add",
    "has_shift",
    "rows",
    "groups",
    "chunks",
    "chunk_rows",
)  # would compile anew for each divisibility, and gain nothing


@triton.jit
def _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, channels):
    extra = tl.zeros(c_idx.shape, tl.float32)
    if has_add:
        extra += tl.load(add_ptr + n * channels + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    if has_shift:
        extra += tl.load(shift_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    return extra


@triton.jit
def _affine(w_ptr, b_ptr, c_idx, c_mask, AFFINE: tl.constexpr):
    scale = tl.full(c_idx.shape, 1.0, tl.float32)
    offset = tl.zeros(c_idx.shape, tl.float32)
    if AFFINE:
        scale = tl.load(w_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
        offset = tl.load(b_ptr + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit(do_not_specialize=UNSPECIALISED)
def group_norm_single(
    x_ptr, y_ptr, w_ptr, b_ptr, add_ptr, shift_ptr, has_add, has_shift, silu, rows, channels, eps,
    CPG: tl.constexpr, AFFINE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    c_idx = tl.program_id(0) * CPG + c
    c_mask = c < CPG
    r_idx = tl.arange(0, BLOCK_R)
    mask = (r_idx < rows)[:, None] & c_mask[None, :]
    place = n.to(tl.int64) * rows * channels + r_idx[:, None] * channels + c_idx[None, :]
    extra = _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, channels)
    scale, offset = _affine(w_ptr, b_ptr, c_idx, c_mask, AFFINE)
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) + extra[None, :]
    count = rows.to(tl.float32) * CPG
    mean = tl.sum(tl.sum(tl.where(mask, x, 0.0), axis=1), axis=0) / count
    deviation = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(deviation * deviation, axis=1), axis=0) / count + eps)
    y = deviation * (rstd * scale)[None, :] + offset[None, :]
    y = y * tl.where(silu, tl.sigmoid(y), 1.0)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def group_norm_moments(
    x_ptr, partial_ptr, add_ptr, shift_ptr, has_add, has_shift, rows, channels, groups, chunks, chunk_rows,
    CPG: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    n = tl.program_id(2)
    c = tl.arange(0, BLOCK_C)
    g = tl.arange(0, GROUP_BLOCK)
    c_idx = tl.program_id(1) * GROUP_BLOCK * CPG + c
    c_mask = (c < GROUP_BLOCK * CPG) & (c_idx < channels)
    row = chunk * chunk_rows
    row_end = tl.minimum(row + chunk_rows, rows)
    x_ptr += n.to(tl.int64) * rows * channels
    # Deviations from the chunk's first row, not from zero: sums of squares then keep their digits, and nothing has to
    # be reduced across threads before the end of the loop.
    pivot = tl.load(x_ptr + row.to(tl.int64) * channels + c_idx, mask=c_mask, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for r in range(row, row_end, BLOCK_R):
        r_idx = r + tl.arange(0, BLOCK_R)
        mask = (r_idx < row_end)[:, None] & c_mask[None, :]
        place = r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, x - pivot[None, :], 0.0)
        sums += deviation
        squares += deviation * deviation
    count = (row_end - row).to(tl.float32)
    shift = tl.sum(sums, axis=0) / count
    m2 = tl.sum(squares, axis=0) - shift * shift * count
    mean = pivot + shift + _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, channels)

    member = ((c // CPG)[:, None] == g[None, :]) & c_mask[:, None]
    group_mean = tl.sum(tl.where(member, mean[:, None], 0.0), axis=0) / CPG
    spread = mean[:, None] - group_mean[None, :]
    group_m2 = tl.sum(tl.where(member, m2[:, None] + count * spread * spread, 0.0), axis=0)
    g_idx = tl.program_id(1) * GROUP_BLOCK + g
    slot = ((n * chunks + chunk) * groups + g_idx) * 2
    tl.store(partial_ptr + slot, group_mean, mask=g_idx < groups)
    tl.store(partial_ptr + slot + 1, group_m2, mask=g_idx < groups)


@triton.jit(do_not_specialize=UNSPECIALISED)
def group_norm_apply(
    x_ptr, y_ptr, partial_ptr, w_ptr, b_ptr, add_ptr, shift_ptr, has_add, has_shift, silu,
    rows, channels, groups, chunks, chunk_rows, eps,
    CPG: tl.constexpr, GROUP_BLOCK: tl.constexpr, AFFINE: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    n = tl.program_id(2)
    c = tl.arange(0, BLOCK_C)
    g = tl.arange(0, GROUP_BLOCK)
    k = tl.arange(0, CHUNKS)
    c_idx = tl.program_id(1) * GROUP_BLOCK * CPG + c
    c_mask = (c < GROUP_BLOCK * CPG) & (c_idx < channels)

    g_idx = tl.program_id(1) * GROUP_BLOCK + g
    slot = ((n * chunks + k)[:, None] * groups + g_idx[None, :]) * 2
    known = (k < chunks)[:, None] & (g_idx < groups)[None, :]
    means = tl.load(partial_ptr + slot, mask=known, other=0.0)
    m2s = tl.load(partial_ptr + slot + 1, mask=known, other=0.0)
    counts = tl.maximum(tl.minimum(rows - k * chunk_rows, chunk_rows), 0).to(tl.float32) * CPG
    total = rows.to(tl.float32) * CPG
    mean = tl.sum(means * counts[:, None], axis=0) / total
    spread = means - mean[None, :]
    m2 = tl.sum(tl.where(known, m2s + counts[:, None] * spread * spread, 0.0), axis=0)
    rstd = tl.rsqrt(m2 / total + eps)

    member = (c // CPG)[:, None] == g[None, :]
    scale, offset = _affine(w_ptr, b_ptr, c_idx, c_mask, AFFINE)
    scale *= tl.sum(tl.where(member, rstd[None, :], 0.0), axis=1)
    centre = tl.sum(tl.where(member, mean[None, :], 0.0), axis=1)
    centre -= _extra(add_ptr, shift_ptr, has_add, has_shift, n, c_idx, c_mask, channels)
    row = chunk * chunk_rows
    row_end = tl.minimum(row + chunk_rows, rows)
    image = n.to(tl.int64) * rows * channels
    for r in range(row, row_end, BLOCK_R):
        r_idx = r + tl.arange(0, BLOCK_R)
        mask = (r_idx < row_end)[:, None] & c_mask[None, :]
        place = image + r_idx.to(tl.int64)[:, None] * channels + c_idx[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        y = (x - centre[None, :]) * scale[None, :] + offset[None, :]
        y = y * tl.where(silu, tl.sigmoid(y), 1.0)
        tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def group_norm(x, num_groups, weight, bias, eps, *, add=None, shift=None, silu=False):
    """Same arguments as the reference; x channels-last, any batch, fp16, bf16 or fp32, moments in fp32."""
    batch, channels, height, width = x.shape
    rows, cpg = height * width, channels // num_groups
    y = torch.empty_like(x)
    # A missing addend is a flag and a pointer never read, and SiLU a flag, not kernels of their own to compile.
    addends = (x if add is None else add.contiguous(), x if shift is None else shift)
    flags = (add is not None, shift is not None)
    affine = {"AFFINE": weight is not None}

    whole = power_of_two(rows) * power_of_two(cpg)
    if whole <= SINGLE_LIMIT:
        launch(
            group_norm_single, (num_groups, batch),
            x, y, weight, bias, *addends, *flags, silu, rows, channels, eps, cpg, **affine,
            BLOCK_C=power_of_two(cpg), BLOCK_R=power_of_two(rows), num_warps=max(1, min(16, whole // 512)),
        )  # fmt: skip
        return y

    block_channels, warp_elements = (64, 512) if rows >= LARGE_ROWS else (32, 1024)
    group_block = min(floor_power_of_two(max(1, block_channels // cpg)), power_of_two(num_groups))
    block_c = power_of_two(cpg * group_block)
    block_r = max(1, min(TILE // block_c, power_of_two(rows)))
    warps = max(1, min(8, block_c * block_r // warp_elements))
    shape = {"BLOCK_C": block_c, "BLOCK_R": block_r, "num_warps": warps}
    blocks, tiles = triton.cdiv(num_groups, group_block), triton.cdiv(rows, block_r)
    wanted = max(1, PROGRAMS_PER_SM * multiprocessors(x.device) // (blocks * batch))
    chunk_rows = triton.cdiv(tiles, min(wanted, tiles)) * block_r
    chunks = triton.cdiv(rows, chunk_rows)
    grid = (chunks, blocks, batch)
    partial = torch.empty((batch, chunks, num_groups, 2), device=x.device, dtype=torch.float32)
    launch(
        group_norm_moments, grid,
        x, partial, *addends, *flags, rows, channels, num_groups, chunks, chunk_rows, cpg, group_block, **shape,
    )  # fmt: skip
    constants = {**affine, "CHUNKS": max(LEAST_CHUNKS, power_of_two(chunks)), **shape}
    launch(
        group_norm_apply, grid,
        x, y, partial, weight, bias, *addends, *flags, silu, rows, channels, num_groups, chunks, chunk_rows, eps,
        cpg, group_block, **constants,
    )  # fmt: skip
    return y


def _specimen(kernel, dtype):
    types = {f"{name}_ptr": f"*{dtype}" for name in ("x", "y", "w", "b", "add", "shift")}
    types |= dict.fromkeys(("has_add", "has_shift", "silu"), "i1")
    types |= dict.fromkeys(("rows", "channels", "groups", "chunks", "chunk_rows"), "i32")
    types |= {"partial_ptr": "*fp32", "eps": "fp32"}
    constants = {"CPG": 10, "GROUP_BLOCK": 4, "AFFINE": True}
    return kernel, types, constants | {"CHUNKS": 64, "BLOCK_C": 64, "BLOCK_R": 128}, 8


# What the compile check builds without a GPU: kernel, argument types, constants, warps.
SPECIMENS = tuple(
    _specimen(kernel, dtype)
    for kernel in (group_norm_single, group_norm_moments, group_norm_apply)
    for dtype in ("fp16", "bf16", "fp32")
)
