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

NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE, COLUMNS = "input_scale", "input_columns"
# What calibration fixes for them, and the buffer of a `QuantizedLinear` where it is.
FIXED: dict[str | None, str] = {"int8-static": SCALE, "fp8-static": SCALE, "int8-outliers-static": COLUMNS}
THRESHOLD = 6.0  # of the absolute value, as published: columns that pass it are outliers


def kind_of(activations: str) -> str:
    """What a weight must be stored as, "int8" or "fp8"."""
    return activations.partition("-")[0]


def is_static(activations: str | None) -> bool:
    """Whether calibration fixed something for it: one scale of all inputs, or which columns are outliers."""
    return activations in FIXED


def many(x: torch.Tensor) -> bool:
    """Whether x (..., K) has so many rows that they are rounded."""
    return x.numel() > MOST_ROWS * x.shape[-1]


def many_rows(count: int) -> bool:
    """The same of a number of rows."""
    return count > MOST_ROWS


@dataclass(frozen=True)
class RowProducts:
    """The operations by which rows are rounded and multiplied."""

    quantize_rows: Callable = quantize_rows
    int8_linear: Callable = int8_linear
    fp8_linear: Callable = fp8_linear

    def rounded(
        self,
        x: torch.Tensor,
        activations: str,
        norm: Norm | None = None,
        fixed: torch.Tensor | KnownColumns | None = None,
    ) -> QuantizedRows:
        """norm(x) in 8 bits; x: (..., K). activations: a value of `Options.activations`. fixed: what `FIXED` names,
        columns looked up as KnownColumns.
        """
        given: dict[str, Any] = {"norm": norm, "dtype": NUMBERS[kind_of(activations)]}
        if activations == "int8-outliers":
            given["outliers"] = THRESHOLD
        elif FIXED.get(activations) == SCALE:
            given["scale"] = fixed
        elif isinstance(fixed, KnownColumns) and fixed.columns.numel():
            given["outliers"] = fixed
        return self.quantize_rows(x.contiguous(), **given)

    def product(self, activations: str) -> Callable:
        """The operation that takes such rows, and a `Quantized` weight of the same kind."""
        return self.fp8_linear if kind_of(activations) == "fp8" else self.int8_linear


KERNELS = RowProducts()
REFERENCES = RowProducts(quantize_rows.reference, int8_linear.reference, fp8_linear.reference)


def multiply(
    x: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None,
    activations: str | None,
    products: RowProducts,
    exact: bool,
    fixed: torch.Tensor | KnownColumns | None = None,
) -> torch.Tensor:
    """x W^T + b; x: (..., K). activations: how its rows are rounded, None for not; fixed: see `RowProducts.rounded`.

    products: what rounds and multiplies. exact: by torch's product with the dequantized weight, and by no kernel.
    """
    if activations is not None:
        used = REFERENCES if exact else products
        return used.product(activations)(used.rounded(x, activations, fixed=fixed), weight, bias)
    if exact:
        return F.linear(x, weight.dequantized(x.dtype), bias)
    return quantized_linear(x.contiguous(), weight, bias)


def as_quantized(dtype: torch.dtype, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Quantized:
    """The weight whose packed elements are of this dtype; buffers hold float8 as bytes."""
    return Quantized(data if data.dtype == dtype else data.view(dtype), scales, zeros)


@dataclass(frozen=True)
class QuantizedCall:
    """Called with x, a linear's buffers `data`, `scales` and `zeros`, and its bias; equal for linears that compute
    alike.

    A `TorchFunctionMode` sees this one call and nothing inside. number: the dtype of the weight's elements.
    activations, products, exact: as of `multiply`; only many rows are rounded.
    """

    number: torch.dtype
    activations: str | None
    products: RowProducts
    exact: bool
    __name__: ClassVar[str] = "quantized_linear"

    def weight(self, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Quantized:
        return as_quantized(self.number, data, scales, zeros)

    def rounds(self, rows: int) -> str | None:
        """How so many rows are rounded, None where they are not."""
        return self.activations if many_rows(rows) else None

    def __call__(
        self,
        x: torch.Tensor,
        data: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        kind = self.rounds(x.numel() // x.shape[-1])
        return multiply(x, self.weight(data, scales, zeros), bias, kind, self.products, self.exact)


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
        numbers: torch.Tensor,
        row_scales: torch.Tensor,
        data: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bias: torch.Tensor | None,
        **after: Any,
    ) -> torch.Tensor:
        """after: what follows in the same pass, as of `int8_linear`."""
        activations = self.call.activations
        assert activations is not None
        rows = QuantizedRows(numbers, row_scales, self.dtype)
        return self.call.products.product(activations)(rows, self.call.weight(data, scales, zeros), bias, **after)
