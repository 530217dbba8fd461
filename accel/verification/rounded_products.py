"""Products of rounded rows, judged one by one.

A number next to a half may be rounded either way, and what follows it in a model then drifts as far as all rounding
does. Each is therefore compared by itself, with the formula on the very input that it had.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accel_kernels import Norm, QuantizedRows
from accel_kernels.gemm.quantize_rows import KnownColumns
from accel_kernels.norm import norm as norms
from accel_kernels.rowwise.row_numbers import LEAST, LEAST_PEAK, MOST
from torch import Tensor, nn

from accel.comparison import relative_rms, worst
from accel.quantization.activations import FIXED, KERNELS, REFERENCES, THRESHOLD, RowProducts
from accel.quantization.module import setting
from accel.tolerances import FLOOR, PRODUCT, STEP
from accel.verification.metrics import Quality


@dataclass(frozen=True)
class Judged(RowProducts):
    """The kernels; `rows` and `products` tell of every result its error by what is allowed, and its relative RMS."""

    rows: list[tuple[float, float]] = field(default_factory=list)
    products: list[tuple[float, float]] = field(default_factory=list)

    def rounded(
        self, x: Tensor, activations: str, norm: Norm | None = None, fixed: Tensor | KnownColumns | None = None
    ) -> QuantizedRows:
        rows = KERNELS.rounded(x, activations, norm, fixed)
        h = x.double() if norm is None else norms.reference(x.double(), norm)
        fixed = fixed.columns if isinstance(fixed, KnownColumns) else fixed
        self.rows.append(_rounding(rows, h, **{} if fixed is None else {FIXED[activations]: fixed}))
        return rows

    def product(self, activations: str) -> Callable:
        kernel, reference = KERNELS.product(activations), REFERENCES.product(activations)

        def judged(x: QuantizedRows, *given: Any, **more: Any) -> Tensor:
            found, own = kernel(x, *given, **more), reference(x, *given, **more)
            exact = reference(x._replace(scales=x.scales.double()), *given, **more)
            meant = exact.isfinite()
            pair = [one.double().masked_fill(~meant, 0) for one in (found, own)]
            exact = exact.masked_fill(~meant, 0)
            error, own_error = (relative_rms(one, exact) for one in pair)
            self.products.append((error / (PRODUCT[x.data.dtype] * own_error + FLOOR), error))
            return found

        return judged


def _rounding(
    rows: QuantizedRows, h: Tensor, input_scale: Tensor | None = None, input_columns: Tensor | None = None
) -> tuple[float, float]:
    """The largest error of a number by half a step, and the relative RMS; h: (..., K) float64, what was rounded.

    input_scale: that was given; what is beyond it is to be its largest number. input_columns: the outliers to be.
    """
    scale = input_scale
    scales, numbers, most = rows.scales.double(), rows.data.double(), MOST[rows.data.dtype]
    meant = h.isfinite().all(-1, keepdim=True)
    if bool((scales.isfinite() != meant).any()):
        return math.inf, math.inf
    h, scales = h.masked_fill(~meant, 0), scales.masked_fill(~meant, 1)
    given, values, allowed = h, numbers * scales, scales * (0.5 + STEP)
    if scale is not None:
        h = h.clamp(LEAST[rows.data.dtype] * scale.double(), most * scale.double())
        if bool((scales != scale.double()).logical_and(meant).any()):
            return math.inf, math.inf
    if rows.data.dtype == torch.float8_e4m3fn:  # 3 bits behind the point, down to the subnormal numbers
        allowed = torch.maximum(h.abs() / 16, scales * 2**-10) * (1 + STEP)
    if rows.outliers is not None and rows.count is not None:
        taken, columns = rows.taken(torch.float64)
        values = values.index_add(-1, columns, taken.masked_fill(~meant, 0))
        own = torch.zeros_like(h, dtype=torch.bool).index_fill(-1, columns[: int(rows.count)], True)
        allowed = torch.where(own, h.abs() * max(torch.finfo(rows.dtype).eps, FLOOR) + 1e-30, allowed)
        overlooked: Tensor | bool
        if input_columns is None:
            overlooked = (h.abs().masked_fill(own, 0) > THRESHOLD * (1 + STEP)).any()
        else:
            overlooked = own[..., input_columns].logical_not().any() or int(rows.count) != len(input_columns)
        if bool(overlooked):
            return math.inf, math.inf
    elif input_columns is not None and input_columns.numel():
        return math.inf, math.inf
    # A scale larger than need be would pass the rest.
    full = (numbers.abs().amax(-1, keepdim=True) >= most) | (scales * most <= 2 * LEAST_PEAK)
    if scale is not None:
        full = torch.ones_like(full)
    largest = ((values - h).abs() / allowed).masked_fill(~meant, 0).masked_fill(meant & ~full, torch.inf).max()
    return float(largest), relative_rms(values.masked_fill(~meant, 0), given)


def judge(model: nn.Module, run: Callable[[], object]) -> dict[str, Quality]:
    """Quality of the rounded rows and of their products, in one run of an optimized model; empty where it has none."""
    judged = Judged()
    with setting(model, products=judged):
        run()
    named = {"rounded rows": judged.rows, "their products": judged.products}
    return {name: _quality(found) for name, found in named.items() if found}


def _quality(found: list[tuple[float, float]]) -> Quality:
    error, rms = map(worst, zip(*found, strict=True))
    return Quality(
        max_error=rms,
        relative_error=rms,
        psnr_db=-20 * math.log10(rms) if 0 < rms < math.inf else math.inf,
        finite=math.isfinite(error),
        relative_rms=rms,
        error=error,
        allowed=1.0,
        measure=f"worst of {len(found)}, by what is allowed,",
    )
