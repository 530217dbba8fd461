"""Products of many rows with both factors in 8 bits: each row rounded as it comes, by a scale of its own.

Scales by token at run time: Yao et al., "ZeroQuant", 2022. Columns above a threshold kept in 16 bits: Dettmers et al.,
"LLM.int8()", 2022. Few rows keep all their bits: there a product takes as long as reading its weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from accel_kernels import Norm, Quantized, QuantizedRows, fp8_linear, int8_linear, quantize_rows, quantized_linear
from accel_kernels.gemm.fused_linear import MOST_ROWS
from accel_kernels.gemm.quantize_rows import KnownColumns
from accel_kernels.gemm.quantized_weight import WeightFormat, scale_bits
from torch import Tensor

ROW_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE, COLUMNS, ORDER = "input_scale", "input_columns", "input_order"
# What calibration fixes for them, and the buffer of a `QuantizedLinear` where it is.
FIXED: dict[str | None, str] = {"int8-static": SCALE, "fp8-static": SCALE, "int8-outliers-static": COLUMNS}
THRESHOLD = 6.0  # of the absolute value, as published: columns that pass it are outliers


def weight_dtype_of(activations: str) -> str:
    """What a weight must be stored as, "int8" or "fp8"."""
    return activations.partition("-")[0]


def is_static(activations: str | None) -> bool:
    """Whether calibration fixed something for it: one scale of all inputs, or which columns are outliers."""
    return activations in FIXED


def many_rows(x: Tensor) -> bool:
    """Whether x (..., K) has so many rows that they are rounded."""
    return x.numel() > MOST_ROWS * x.shape[-1]


@dataclass(frozen=True)
class RowProducts:
    """The operations by which rows are rounded and multiplied."""

    quantize_rows: Callable = quantize_rows
    int8_linear: Callable = int8_linear
    fp8_linear: Callable = fp8_linear

    def rounded(
        self, x: Tensor, activations: str, norm: Norm | None = None, fixed: Tensor | KnownColumns | None = None
    ) -> QuantizedRows:
        """norm(x) in 8 bits; x: (..., K). activations: of `Options`. fixed: of `FIXED`, columns as KnownColumns."""
        given: dict[str, Any] = {"norm": norm, "dtype": ROW_DTYPES[weight_dtype_of(activations)]}
        if activations == "int8-outliers":
            given["outliers"] = THRESHOLD
        elif FIXED.get(activations) == SCALE:
            given["scale"] = fixed
        elif isinstance(fixed, KnownColumns) and fixed.columns.numel():
            given["outliers"] = fixed
        return self.quantize_rows(x.contiguous(), **given)

    def product(self, activations: str) -> Callable:
        """The operation that takes such rows, and a `Quantized` weight of the same kind."""
        return self.fp8_linear if weight_dtype_of(activations) == "fp8" else self.int8_linear


KERNELS = RowProducts()
REFERENCES = RowProducts(quantize_rows.reference, int8_linear.reference, fp8_linear.reference)


def buffers_of(weight: Quantized) -> dict[str, Tensor | None]:
    """The parts of a weight as modules hold them: float8 as bytes, since torch does not pickle float8."""
    data = weight.data.view(torch.uint8) if weight.data.is_floating_point() else weight.data
    return {"data": data, "scales": scale_bits(weight), "zeros": weight.zeros}


def from_buffers(format: WeightFormat, data: Tensor, scales: Tensor, zeros: Tensor | None) -> Quantized:
    """`buffers_of` taken back; also of some rows of them."""
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
    return Quantized(data if data.dtype == format.dtype else data.view(format.dtype), scales, zeros, format)


@dataclass(frozen=True)
class QuantizedCall:
    """Called with x (..., K), a linear's buffers `data`, `scales` and `zeros`, its bias, and what calibration fixed:
    x W^T + b. Equal for linears that compute alike.

    A `TorchFunctionMode` sees this one call and nothing inside. format: of the weight. activations: how rows are
    rounded where there are many, None for not. products: what rounds and multiplies. exact: by torch's product with the
    dequantized weight, and by no kernel.
    """

    format: WeightFormat
    activations: str | None
    products: RowProducts
    exact: bool
    __name__: ClassVar[str] = "quantized_linear"

    def weight(self, data: Tensor, scales: Tensor, zeros: Tensor | None) -> Quantized:
        return from_buffers(self.format, data, scales, zeros)

    def rounds(self, rows: int) -> str | None:
        """How so many rows are rounded, None where they are not."""
        return self.activations if rows > MOST_ROWS else None

    def written_out(self, rows: int) -> bool:
        """Whether the weight is written out before the product of so many rows, which then is torch's own."""
        return not self.exact and self.rounds(rows) is None and rows > self.format.most_rows

    def __call__(
        self,
        x: Tensor,
        data: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        fixed: Tensor | KnownColumns | None = None,
    ) -> Tensor:
        weight = self.weight(data, scales, zeros)
        if self.activations is not None and many_rows(x):
            products = REFERENCES if self.exact else self.products
            rows = products.rounded(x, self.activations, fixed=fixed)
            return products.product(self.activations)(rows, weight, bias)
        if self.exact:
            return F.linear(x, weight.dequantized(x.dtype), bias)
        return quantized_linear(x.contiguous(), weight, bias)


@dataclass(frozen=True)
class RoundedCall:
    """As `QuantizedCall`, for rows that are rounded: called with their elements (..., K) and scales (..., 1) in place
    of x.

    dtype: of the result, and of the rows before.
    """

    call: QuantizedCall
    dtype: torch.dtype
    __name__: ClassVar[str] = "rounded_product"

    def __call__(
        self,
        numbers: Tensor,
        row_scales: Tensor,
        data: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        **after: Any,
    ) -> Tensor:
        """after: what follows in the same pass, as of `int8_linear`."""
        activations = self.call.activations
        assert activations is not None
        rows = QuantizedRows(numbers, row_scales, self.dtype)
        return self.call.products.product(activations)(rows, self.call.weight(data, scales, zeros), bias, **after)
