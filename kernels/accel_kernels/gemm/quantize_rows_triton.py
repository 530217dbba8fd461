"""Rows to 8 bits: a program a row, all of it in registers, norm, scale and numbers in one pass.

Columns to be taken out come as a mask and as a list; for a threshold a pass in front finds them. Their number never
leaves the device. Where they are few, a row reads them again by the list; where all are, the row itself is stored.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.device import Feature, has, programmatic, shared_memory
from accel_kernels.gemm.quantize_rows import SHARE, KnownColumns, QuantizedRows, known_columns
from accel_kernels.norm.norm import NormArguments, kernel_arguments
from accel_kernels.rowwise.row_numbers import LEAST, MOST, REACH
from accel_kernels.rowwise.row_numbers_triton import (
    SMALLEST,
    bounded_tile,
    int8_tile,
    magnitude,
    nearest_float8,
    numbers_tile,
    scale_tile,
)
from accel_kernels.sizes import cdiv, power_of_two
from accel_kernels.warmup import launch

AT_ONCE = tl.constexpr(32)  # outliers of a row


@triton.jit
def _statistics(x, mask, k, eps, NORM: tl.constexpr):
    """One row in fp32 or a block of them, zeros where mask is not set: less its mean, the mean, and 1 over the rms."""
    columns: tl.constexpr = len(x.shape) - 1
    mean = 0.0
    factor = 1.0
    if NORM == "layer":
        mean = tl.sum(x, axis=columns, keep_dims=True) / k
        x = tl.where(mask, x - mean, 0.0)
    if NORM != "none":
        factor = tl.rsqrt(tl.sum(x * x, axis=columns, keep_dims=True) / k + eps)
    return x, mean, factor


@triton.jit
def _affine(norm, k_idx, mask):
    """Weight and bias of the norm; 1 and 0 where it has none."""
    weight = 1.0
    bias = 0.0
    if norm.weight is not None:
        weight = tl.load(norm.weight + k_idx, mask=mask, other=0.0).to(tl.float32) + norm.offset
    if norm.bias is not None:
        bias = tl.load(norm.bias + k_idx, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit(do_not_specialize=("rows",))
def outlier_columns_kernel(
    x_ptr, norm, mask_ptr, counter_ptr, columns_ptr, count_ptr, rows, k, threshold, NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SHARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program some rows: sets the mask of columns in which one is above the threshold, all alike where several do.

    mask and counter are zeros before. The last program makes a list of the mask, and counts; of all columns, where the
    mask has more than one in SHARE.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_idx = tl.arange(0, BLOCK_K)
    mask = k_idx < k
    weight, bias = _affine(norm, k_idx, mask)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)  # the last one again costs nothing
    place = x_ptr + row.to(tl.int64)[:, None] * k + k_idx[None, :]
    x = tl.load(place, mask=mask[None, :], other=0.0).to(tl.float32)
    h, _, factor = _statistics(x, mask[None, :], k, norm.eps, NORM)
    if NORM != "none":
        h = h * factor * weight + bias
    found = mask & (tl.max(tl.abs(h), axis=0) > threshold)
    tl.store(mask_ptr + k_idx, found.to(tl.int8), mask=found)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        out = tl.load(mask_ptr + k_idx, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
        out = tl.where(mask & (tl.sum(out, axis=0) * SHARE > k), 1, out)
        tl.store(columns_ptr + tl.cumsum(out, axis=0) - 1, k_idx.to(tl.int64), mask=out != 0)
        tl.store(count_ptr, tl.sum(out, axis=0))


@triton.jit(do_not_specialize=("capacity",))
def quantize_rows_kernel(
    x_ptr, norm, mask_ptr, columns_ptr, count_ptr, given_scale_ptr, data_ptr, scales_ptr, outliers_ptr, k, capacity,
    NORM: tl.constexpr, ROUND: tl.constexpr, REACH: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    BY_HAND: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k_idx = tl.arange(0, BLOCK_K)
    mask = k_idx < k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight, bias = _affine(norm, k_idx, mask)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * k + k_idx, mask=mask, other=0.0).to(tl.float32)
    h, mean, factor = _statistics(x, mask, k, norm.eps, NORM)
    if NORM != "none":
        h = tl.where(mask, h * factor * weight + bias, 0.0)
    if mask_ptr is not None:
        count = tl.load(count_ptr)
        if count == k:
            tl.store(outliers_ptr + row * capacity + k_idx, h.to(outliers_ptr.dtype.element_ty), mask=mask)
            h = tl.zeros((BLOCK_K,), tl.float32)
        else:
            h = tl.where(tl.load(mask_ptr + k_idx, mask=mask, other=0) != 0, 0.0, h)
        for start in range(0, tl.where(count == k, 0, count), AT_ONCE):
            o_idx = start + tl.arange(0, AT_ONCE)
            o_mask = o_idx < count
            column = tl.load(columns_ptr + o_idx, mask=o_mask, other=0)
            taken = tl.load(x_ptr + row * k + column, mask=o_mask, other=0.0).to(tl.float32)
            if NORM != "none":
                its_weight, its_bias = _affine(norm, column, o_mask)
                taken = (taken - mean) * factor * its_weight + its_bias
            tl.store(outliers_ptr + row * capacity + o_idx, taken.to(outliers_ptr.dtype.element_ty), mask=o_mask)
    peak = tl.maximum(tl.max(magnitude(h), axis=0), SMALLEST)
    if given_scale_ptr is not None:
        scale = tl.where(peak < float("inf"), tl.load(given_scale_ptr), float("nan"))
    else:
        scale = scale_tile(peak, REACH)
    if x_ptr.dtype.element_ty == tl.float32:
        y = bounded_tile(tl.div_rn(h, tl.broadcast_to(scale, (BLOCK_K,))), LEAST, MOST, ROUND)  # as the reference says
    elif given_scale_ptr is not None:
        y = bounded_tile(h * tl.div_rn(1.0, tl.load(given_scale_ptr)), LEAST, MOST, ROUND)
    elif ROUND:
        y = int8_tile(h, peak, REACH, MOST)
    else:
        y = numbers_tile(h, peak, REACH, LEAST, MOST, ROUND)
    if BY_HAND:
        y = nearest_float8(y)
    tl.store(data_ptr + row * k + k_idx, y.to(data_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale)


def _numbers(dtype: torch.dtype, device: torch.device) -> dict:
    """Constants of a kernel that rounds to this dtype."""
    ends = {"REACH": REACH[dtype], "LEAST": LEAST[dtype], "MOST": MOST[dtype]}
    by_hand = dtype != torch.int8 and not has(device, Feature.FLOAT8_AT_ONCE)
    return {"ROUND": dtype == torch.int8, "BY_HAND": by_hand} | ends


def _found(x, norm: NormArguments, threshold: float, flags: dict, meta: dict) -> KnownColumns:
    """Those with a value above the threshold; room for all."""
    k = x.shape[-1]
    rows, at_once = x.numel() // k, 4 if flags["BLOCK_K"] <= 8192 else 2
    if shared_memory(x.device) < 8 * flags["BLOCK_K"]:  # which 16 warps take to count columns
        meta = meta | {"num_warps": meta["num_warps"] // 2}
    zeros = torch.zeros(16 * cdiv(k, 16) + 4, dtype=torch.int8, device=x.device)
    found = KnownColumns(
        zeros[:k],
        torch.empty(k, dtype=torch.int64, device=x.device),
        torch.empty(1, dtype=torch.int32, device=x.device),
    )
    launch(
        outlier_columns_kernel, (cdiv(rows, at_once),),
        x, norm, found.mask, zeros[-4:].view(torch.int32), found.columns, found.count, rows, k, threshold,
        **flags, ROWS=at_once, SHARE=SHARE, PDL=programmatic(x.device)["PDL"], **meta,
    )  # fmt: skip
    return found


def quantize_rows(x, *, norm=None, dtype=torch.int8, outliers=None, scale=None):
    """Same arguments and result as the reference; what lies beyond `count` is not written."""
    k = x.shape[-1]
    rows, block = x.numel() // k, power_of_two(k)
    before, kind = kernel_arguments(norm)
    flags = {"NORM": kind, "BLOCK_K": block}
    meta = {"num_warps": min(16, max(1, block // 512)), "enable_fp_fusion": False}  # rounds as torch does
    data = torch.empty_like(x, dtype=dtype)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    mask = taken = columns = count = None
    capacity = 0
    if outliers is not None:
        known = known_columns(outliers, k)
        if known is None:
            known = _found(x, before, float(outliers), flags, meta)
        mask, columns, count = known
        capacity = columns.numel()
        taken = torch.empty((*x.shape[:-1], capacity), dtype=x.dtype, device=x.device)
    launch(
        quantize_rows_kernel, (rows,),
        x, before, mask, columns, count, scale, data, scales, taken, k, capacity, **flags, **_numbers(dtype, x.device),
        **meta, **programmatic(x.device),
    )  # fmt: skip
    return QuantizedRows(data, scales, x.dtype, taken, columns, count)
