"""Rows to 8 bits: a program a row, all of it in registers, norm, scale and numbers in one pass.

Columns to be taken out are known before. For a threshold a pass in front finds them, by blocks of rows. The running sum
of their mask, taken once for all rows, says where in a row of outliers each goes, and how many there are: their count
never leaves the device.
"""

import torch
import triton
import triton.language as tl

from accel_kernels.quantise_rows import LEAST_PEAK, MOST, QuantisedRows, room
from accel_kernels.rehearsal import launch
from accel_kernels.triton_kernels.dependents import programmatic
from accel_kernels.triton_kernels.launch import power_of_two


@triton.jit
def _normed(x_ptr, k_idx, mask, weight, bias, k, eps, NORM: tl.constexpr):
    """One row in fp32 or a block of them, the norm of each taken; zeros where mask is not set."""
    x = tl.load(x_ptr + k_idx, mask=mask, other=0.0).to(tl.float32)
    columns: tl.constexpr = len(x.shape) - 1
    if NORM == "layer":
        x = tl.where(mask, x - tl.sum(x, axis=columns, keep_dims=True) / k, 0.0)
    if NORM != "none":
        x = x * tl.rsqrt(tl.sum(x * x, axis=columns, keep_dims=True) / k + eps) * weight + bias
    return x


@triton.jit
def _affine(nw_ptr, nb_ptr, k_idx, mask, offset, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr):
    """Weight and bias of the norm; 1 and 0 where it has none."""
    weight = 1.0
    bias = 0.0
    if HAS_NW:
        weight = tl.load(nw_ptr + k_idx, mask=mask, other=0.0).to(tl.float32) + offset
    if HAS_NB:
        bias = tl.load(nb_ptr + k_idx, mask=mask, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _places(mask_ptr, place_ptr, columns_ptr, count_ptr, k_idx, mask):
    """Of a mask over columns: where in a row of outliers each goes, -1 for one that stays; which they are, how many."""
    out = tl.load(mask_ptr + k_idx, mask=mask, other=0, cache_modifier=".cg").to(tl.int32)
    place = tl.where(out != 0, tl.cumsum(out, axis=0) - 1, -1)
    tl.store(place_ptr + k_idx, place.to(tl.int16), mask=mask)
    tl.store(columns_ptr + place, k_idx.to(tl.int64), mask=mask & (out != 0))
    tl.store(count_ptr, tl.sum(out, axis=0))


@triton.jit(do_not_specialize=("rows",))
def outlier_columns_kernel(
    x_ptr, nw_ptr, nb_ptr, mask_ptr, ticket_ptr, place_ptr, columns_ptr, count_ptr, rows, k, eps, offset, threshold,
    NORM: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program some rows: sets the mask of columns in which one is above the threshold. The last makes places of it.

    mask and ticket are zeros before. All that set a column write the same.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_idx = tl.arange(0, BLOCK_K)
    mask = k_idx < k
    weight, bias = _affine(nw_ptr, nb_ptr, k_idx, mask, offset, HAS_NW, HAS_NB)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)  # the last one again costs nothing
    h = _normed(x_ptr + row.to(tl.int64)[:, None] * k, k_idx[None, :], mask[None, :], weight, bias, k, eps, NORM)
    found = mask & (tl.max(tl.abs(h), axis=0) > threshold)
    tl.store(mask_ptr + k_idx, found.to(tl.int8), mask=found)
    tl.debug_barrier()
    if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _places(mask_ptr, place_ptr, columns_ptr, count_ptr, k_idx, mask)


@triton.jit
def given_columns_kernel(
    given_ptr, mask_ptr, place_ptr, columns_ptr, count_ptr, given, k,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: places of columns that are known, in any order, some of them perhaps twice."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_idx, c_idx = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_C)
    mask = k_idx < k
    tl.store(mask_ptr + k_idx, tl.zeros((BLOCK_K,), tl.int8), mask=mask)
    tl.debug_barrier()
    column = tl.load(given_ptr + c_idx, mask=c_idx < given, other=0)
    tl.store(mask_ptr + column, tl.full((BLOCK_C,), 1, tl.int8), mask=c_idx < given)
    tl.debug_barrier()
    _places(mask_ptr, place_ptr, columns_ptr, count_ptr, k_idx, mask)


@triton.jit(do_not_specialize=("capacity",))
def quantise_rows_kernel(
    x_ptr, nw_ptr, nb_ptr, place_ptr, given_ptr, q_ptr, s_ptr, o_ptr, k, capacity, eps, offset,
    NORM: tl.constexpr, HAS_NW: tl.constexpr, HAS_NB: tl.constexpr, OUTLIERS: tl.constexpr, GIVEN: tl.constexpr,
    ROUND: tl.constexpr,
    MOST: tl.constexpr, LEAST: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k_idx = tl.arange(0, BLOCK_K)
    mask = k_idx < k
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight, bias = _affine(nw_ptr, nb_ptr, k_idx, mask, offset, HAS_NW, HAS_NB)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h = _normed(x_ptr + row * k, k_idx, mask, weight, bias, k, eps, NORM)
    if OUTLIERS:
        place = tl.load(place_ptr + k_idx, mask=mask, other=-1).to(tl.int32)
        tl.store(o_ptr + row * capacity + place, h.to(o_ptr.dtype.element_ty), mask=place >= 0)
        h = tl.where(place >= 0, 0.0, h)
    h = tl.where(mask, h, 0.0)
    # A maximum passes over NaN; as infinity it shows, and makes the scale of the row NaN.
    peak = tl.maximum(tl.max(tl.where(h == h, tl.abs(h), float("inf")), axis=0), LEAST)
    if GIVEN:
        scale = tl.load(given_ptr)
        y = h * tl.div_rn(1.0, scale)
    else:
        scale = tl.div_rn(peak, MOST)
        y = h * tl.div_rn(MOST, peak)
    y = tl.where(y == y, y, 0.0)
    if ROUND:  # to even, as torch: the sum has no bits left for the fraction
        y = (y + 12582912.0) - 12582912.0
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    tl.store(q_ptr + row * k + k_idx, y.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(s_ptr + row, tl.where(peak < float("inf"), scale, float("nan")))


def quantise_rows(x, *, norm=None, dtype=torch.int8, outliers=None, scale=None):
    """Same arguments and result as the reference; what lies beyond `count` is not written."""
    k = x.shape[-1]
    rows, block = x.numel() // k, power_of_two(k)
    nw, nb, eps, centred, offset = norm or (None, None, 0.0, False, 0.0)
    flags = {"NORM": "none" if norm is None else "layer" if centred else "rms"}
    flags |= {"HAS_NW": nw is not None, "HAS_NB": nb is not None, "BLOCK_K": block}
    meta = {"num_warps": min(16, max(1, block // 512)), "enable_fp_fusion": False}  # rounds as torch does
    data = torch.empty_like(x, dtype=dtype)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    place = taken = columns = count = None
    capacity, pdl = 0, programmatic(x.device)
    if outliers is not None:
        capacity = room(outliers, k)
        taken = torch.empty((*x.shape[:-1], capacity), dtype=x.dtype, device=x.device)
        columns = torch.empty(capacity, dtype=torch.int64, device=x.device)
        count = torch.empty(1, dtype=torch.int32, device=x.device)
        place = torch.empty(k, dtype=torch.int16, device=x.device)
        found = (place, columns, count)
        if isinstance(outliers, torch.Tensor):
            launch(
                given_columns_kernel, (1,), outliers, torch.empty(k, dtype=torch.int8, device=x.device), *found,
                outliers.numel(), k, BLOCK_C=power_of_two(capacity), BLOCK_K=block, PDL=bool(pdl),
                num_warps=meta["num_warps"],
            )  # fmt: skip
        else:
            zeros = torch.zeros(4 + k, dtype=torch.int8, device=x.device)
            at_once = 4 if block <= 8192 else 2
            launch(
                outlier_columns_kernel, (triton.cdiv(rows, at_once),),
                x, nw, nb, zeros[4:], zeros[:4].view(torch.int32), *found, rows, k, eps, offset, float(outliers),
                **flags, ROWS=at_once, PDL=bool(pdl), **meta,
            )  # fmt: skip
    launch(
        quantise_rows_kernel, (rows,),
        x, nw, nb, place, scale, data, scales, taken, k, capacity, eps, offset, **flags,
        OUTLIERS=place is not None, GIVEN=scale is not None, ROUND=dtype == torch.int8, MOST=MOST[dtype],
        LEAST=LEAST_PEAK, PDL=bool(pdl), **meta, **pdl,
    )  # fmt: skip
    return QuantisedRows(data, scales, x.dtype, taken, columns, count)


def specimen(q: str, outliers: bool, k: int = 4096, given: bool = False):
    """What the compile check builds: kernel, argument types, constants, warps. q: the type of the numbers."""
    types = {f"{name}_ptr": "*bf16" for name in ("x", "nw", "nb", "o")}
    types |= {"place_ptr": "*i16", "given_ptr": "*fp32", "q_ptr": f"*{q}", "s_ptr": "*fp32"}
    types |= {"k": "i32", "capacity": "i32", "eps": "fp32", "offset": "fp32"}
    constants = {"NORM": "rms", "HAS_NW": True, "HAS_NB": False, "BLOCK_K": power_of_two(k), "OUTLIERS": outliers}
    constants |= {
        "GIVEN": given,
        "ROUND": q == "i8",
        "MOST": 127.0 if q == "i8" else 448.0,
        "LEAST": LEAST_PEAK,
        "PDL": False,
    }
    return quantise_rows_kernel, types, constants, min(16, power_of_two(k) // 512)


def _search_specimen():
    types = {f"{name}_ptr": "*bf16" for name in ("x", "nw", "nb")} | {"mask_ptr": "*i8", "ticket_ptr": "*i32"}
    types |= {"place_ptr": "*i16", "columns_ptr": "*i64", "count_ptr": "*i32"} | dict.fromkeys(("rows", "k"), "i32")
    types |= dict.fromkeys(("eps", "offset", "threshold"), "fp32")
    constants = {"NORM": "rms", "HAS_NW": True, "HAS_NB": False, "ROWS": 4, "BLOCK_K": 4096, "PDL": False}
    return outlier_columns_kernel, types, constants, 8


def _given_specimen():
    types = {"given_ptr": "*i64", "mask_ptr": "*i8", "place_ptr": "*i16", "columns_ptr": "*i64", "count_ptr": "*i32"}
    types |= {"given": "i32", "k": "i32"}
    return given_columns_kernel, types, {"BLOCK_C": 64, "BLOCK_K": 16384, "PDL": False}, 16


SPECIMENS = (
    specimen("i8", False),
    specimen("i8", True),
    specimen("i8", False, 14336),
    specimen("i8", False, given=True),
    _search_specimen(),
    _given_specimen(),
)
