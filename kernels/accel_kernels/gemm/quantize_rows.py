"""Rows rounded to 8 bits as they come, each by a scale of its own or all by a given one, after the norm in front.

Scales by row at run time: Yao et al., "ZeroQuant", 2022; Xiao et al., "SmoothQuant", 2023. Columns kept in 16 bits,
those with a value beyond a threshold: Dettmers et al., "LLM.int8()", 2022.
"""

from typing import Any, NamedTuple

import torch

from accel_kernels.device import float8_reason
from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import norm_reason, norm_weights
from accel_kernels.op import contiguous_reason, dtype_reason, make_op, random_cases
from accel_kernels.product_cases import case_norm
from accel_kernels.rowwise.row_numbers import MOST, bounded, row_numbers, row_peak, row_scale

# Where more than one column in so many holds an outlier, all stay in 16 bits: there the four products of a layer
# of the Llama-3.1-8B shape take about as long either way on an H200, see `benchmarks products --study outliers`.
SHARE = 16
SINGLE = torch.float32  # rows of it are rounded, and multiplied, bit for bit as by compressed-tensors


class QuantizedRows(NamedTuple):
    """x (..., K) = data * scales, and the columns taken out of it, where data holds zeros.

    data: (..., K) int8 or float8_e4m3fn. scales: (..., 1) float32; NaN where a row held something not finite. dtype:
    of x. outliers: (..., capacity) in that dtype, of which the first `count` are meant. columns: where they were,
    (capacity,) int64 in ascending order. count: (1,) int32, on the device, so that the host does not wait.
    """

    data: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype
    outliers: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    count: torch.Tensor | None = None  # type: ignore[assignment]  # hides the method of tuples

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    def taken(self, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Outliers in this dtype and their columns; what is beyond `count` as zeros of column 0."""
        outliers: Any
        columns: Any
        count: Any
        outliers, columns, count = self.outliers, self.columns, self.count  # none is None here
        meant = torch.arange(columns.numel(), device=columns.device) < count
        return outliers.to(kind).masked_fill(~meant, 0), columns.masked_fill(~meant, 0)

    def dequantized(self, kind: torch.dtype) -> torch.Tensor:
        """(..., K) in this dtype, rounded once, from float32."""
        wide = self.data.float() * self.scales.float()
        if self.outliers is not None:
            taken, columns = self.taken(torch.float32)
            wide = wide.index_add(-1, columns, taken)
        return wide.to(kind)


class KnownColumns(NamedTuple):
    """Columns that are never rounded, looked up once: nothing but the pass that rounds is left to do in a call.

    mask: (K,) int8, 1 for each of them. columns, count: as of QuantizedRows.
    """

    mask: torch.Tensor
    columns: torch.Tensor
    count: torch.Tensor  # type: ignore[assignment]

    @classmethod
    def of(cls, columns: torch.Tensor, k: int) -> "KnownColumns":
        """columns: int64, in any order, some of them perhaps twice. Raises IndexError for one beyond K, on a CPU."""
        mask = torch.zeros(k, dtype=torch.int8, device=columns.device).index_fill_(0, columns, 1)
        ascending = mask.argsort(descending=True, stable=True)[: columns.numel()]
        return cls(mask, ascending, mask.sum(dtype=torch.int32).view(1))


def reference(x, *, norm=None, dtype=torch.int8, outliers=None, scale=None):
    """x: (..., K). Returns QuantizedRows; nothing waits for the device.

    norm: a Norm over K, or None; not rounded before the numbers are. dtype: int8 (-128..127) or float8_e4m3fn.
    outliers: None; or columns that are all taken out, int64 or KnownColumns; or a threshold: columns in which any
    absolute value is above it, or all columns where those are more than one in SHARE; there is room for them. scale:
    None for one of each row's own, its largest absolute value over 127.5 (float8: 448), by which the largest may be
    half a step beyond the last number, which stands for it; or one float32 above 0 for all, on the device: what is
    beyond the least and the largest number saturates. A float32 x is rounded bit for bit as by compressed-tensors.
    Raises ValueError for another dtype, a threshold that is not above 0, and outliers besides float8.
    """
    if dtype not in MOST:
        raise ValueError(f"rows are rounded to int8 or float8_e4m3fn, not {dtype}")
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    h = x.to(kind) if norm is None else norms.reference(x.to(kind), norm)
    taken = columns = count = None
    if outliers is not None:
        if dtype != torch.int8:
            raise ValueError(f"outliers are taken out of int8, not of {dtype}")
        known = known_columns(outliers, h.shape[-1])
        if known is None:
            mask = (h.abs() > _threshold(outliers)).flatten(0, -2).any(0)
            mask = mask | (mask.sum() * SHARE > mask.numel())
            columns = mask.to(torch.uint8).argsort(descending=True, stable=True)
            count = mask.sum(dtype=torch.int32).view(1)
        else:
            mask, columns, count = known.mask.bool(), known.columns, known.count
        taken = h.index_select(-1, columns).to(x.dtype)
        h = h.masked_fill(mask, 0)
    peak = row_peak(h)
    scales = (
        row_scale(peak, dtype) if scale is None else scale.to(kind).expand_as(peak).masked_fill(peak.isinf(), torch.nan)
    )
    if x.dtype == SINGLE:
        numbers = bounded(h / scales, dtype)  # whose rounding decides about a negative peak
    elif scale is None:
        numbers = row_numbers(h, peak, dtype)
    else:
        numbers = bounded(h * (1 / scale.to(kind)), dtype)
    return QuantizedRows(numbers.to(dtype), scales, x.dtype, taken, columns, count)


def _threshold(value: float) -> float:
    if not value > 0:
        raise ValueError(f"a threshold of {value}: outliers are above one that is greater than 0")
    return value


def known_columns(outliers: "torch.Tensor | KnownColumns | float", k: int) -> KnownColumns | None:
    """None where a threshold says what an outlier is."""
    if isinstance(outliers, KnownColumns):
        return outliers
    return KnownColumns.of(outliers, k) if isinstance(outliers, torch.Tensor) else None


def supports(x, *, norm=None, dtype=torch.int8, outliers=None, scale=None) -> str | None:
    if x.numel() == 0:
        return "empty"
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != x.device):
        return "a scale that is not one float32 on the device of x"
    if dtype not in MOST or (outliers is not None and dtype != torch.int8):
        return f"rows of {dtype}"
    if isinstance(outliers, KnownColumns):
        if outliers.mask.shape != x.shape[-1:] or outliers.mask.device != x.device:
            return f"known columns of {outliers.mask.numel()} on {outliers.mask.device}"
    elif isinstance(outliers, torch.Tensor):
        if outliers.dtype != torch.int64 or outliers.dim() != 1 or outliers.device != x.device:
            return "outliers that are not a line of int64 on the device of x"
    elif outliers is not None and not outliers > 0:
        return f"a threshold of {outliers}"
    if x.shape[-1] > 16384:
        return f"{x.shape[-1]} columns, more than 16384"
    return (
        contiguous_reason(x=x)
        or norm_reason(norm)
        or float8_reason(x.device, dtype)
        or dtype_reason(x, *norm_weights(norm))
    )


@random_cases
def _case(rand, *shape, norm=None, to=torch.int8, planted=(), outliers=None, scale=None):
    x = rand(*shape)
    x[..., list(planted)] *= 20
    given = {"dtype": to, "outliers": outliers, "norm": case_norm(norm, rand, shape[-1])}
    if scale is not None:
        given["scale"] = torch.tensor([scale], device=rand.device)
    if isinstance(outliers, tuple):
        given["outliers"] = torch.tensor(outliers, device=rand.device)
    return (x,), given


CASES = (
    _case("plain", 3, 64, small=True),
    _case("odd", 2, 3, 77, small=True),
    _case("rms", 5, 136, norm="rms", small=True),
    _case("layer", 4, 100, norm="layer", small=True),
    _case("fp8", 3, 80, to=torch.float8_e4m3fn, small=True),
    _case("columns", 5, 96, planted=(3, 50), outliers=(50, 3, 70), small=True),
    _case("given", 2, 3, 77, scale=0.0125, small=True),
    _case("given-norm", 5, 136, norm="layer", scale=0.02, small=True),
    _case("given-fp8", 3, 80, norm="rms", to=torch.float8_e4m3fn, scale=0.004, small=True),
    _case("given-columns", 5, 96, planted=(3, 50), outliers=(50, 3), scale=0.02, small=True),
    _case("threshold", 19, 96, planted=(0, 41, 95), outliers=6.0, small=True),
    _case("threshold-layer", 7, 100, norm="layer", planted=(3, 99), outliers=4.0, small=True),
    _case("threshold-many", 3, 96, norm="rms", planted=tuple(range(0, 96, 2)), outliers=0.1, small=True),
    _case("columns-layer", 4, 100, norm="layer", outliers=(77, 0), small=True),
    _case("llama", 2048, 4096, norm="rms"),
    _case("llama-down", 2048, 14336),
    _case("llama-threshold", 2048, 4096, norm="rms", planted=(7, 100, 2048), outliers=20.0),
    _case("llama-down-threshold", 2048, 14336, planted=(7, 100, 14335), outliers=20.0),
    _case("llama-given", 2048, 4096, norm="rms", scale=0.02),
    _case("llama-fp8", 2048, 4096, norm="rms", to=torch.float8_e4m3fn),
)

quantize_rows = make_op("quantize_rows", reference, supports, CASES)
