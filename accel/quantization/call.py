"""What a quantized linear computes, as one function of tensors."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from accel_kernels import Quantized, QuantizedRows, quantized_linear
from accel_kernels.gemm.quantize_rows import KnownColumns

from accel.quantization.activations import REFERENCES, RowProducts, many_rows


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


@dataclass(frozen=True)
class QuantizedCall:
    """Called with x, the linear's buffers `data`, `scales` and `zeros`, and its bias; equal for linears that compute
    alike. Whoever watches the functions of torch that run (`TorchFunctionMode`) sees this one, and nothing inside.

    number: the dtype of the weight's numbers. activations, products, exact: as of `multiply`; rows are rounded where
    they are many.
    """

    number: torch.dtype
    activations: str | None
    products: RowProducts
    exact: bool
    __name__: ClassVar[str] = "quantized_linear"

    def weight(self, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Quantized:
        return Quantized(data if data.dtype == self.number else data.view(self.number), scales, zeros)

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
    """The same of rows that are rounded already: called with their numbers (..., K) and scales (..., 1), then as that.

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
