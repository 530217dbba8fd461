"""A linear layer of float8 rows and a float8 weight, by torch's scaled product, and what follows it.

y = residual + scale * act(x W^T + b), or with a gate act(x W^T + b) * (x U^T + c). The format, e4m3: Micikevicius et
al., "FP8 formats for deep learning", 2022; the product, scales by row, is cuBLAS's or CUTLASS's, as torch has it.
"""

from functools import partial

import torch
import torch.nn.functional as F

from accel_kernels.device import float8_reason
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.quantize_rows import SINGLE
from accel_kernels.gemm.quantize_rows import reference as quantize
from accel_kernels.gemm.quantized_weight import Quantized, quantize_weight
from accel_kernels.op import Op
from accel_kernels.product_cases import product_case

FP8 = torch.float8_e4m3fn


def reference(x, weight, bias=None, **after):
    """x: QuantizedRows (..., K) of float8_e4m3fn; weight, up: Quantized of it (N, K), scales (N, 1). Returns (..., N).

    bias, after: the fields of `Epilogue`, tensors in x.dtype as the result. Products of float8 are exact in the float32
    in which they are summed; for x of float32 both factors are multiplied as they stand for, as compressed-tensors
    does. Raises ValueError for numbers that are not float8_e4m3fn, scales that are not by row, and outliers.
    """
    epilogue = Epilogue(bias, **after)
    for one in epilogue.weights(weight):
        if one.data.dtype != FP8 or one.scales.numel() != one.data.shape[0]:
            raise ValueError(f"a weight of {one.data.dtype}, {one.scales.shape[1]} scales to a row: not float8 by row")
    if x.data.dtype != FP8 or x.outliers is not None:
        raise ValueError(f"rows of {x.data.dtype}, outliers {x.outliers is not None}: not float8 without them")
    kind = torch.float64 if x.scales.dtype == torch.float64 else torch.float32

    def product(one: Quantized, shift):
        if x.dtype == kind == SINGLE:
            return F.linear(x.dequantized(kind), one.dequantized(kind), shift)
        y = F.linear(x.data.to(kind), one.data.to(kind)) * x.scales.to(kind) * one.scales.to(kind).view(-1)
        return y if shift is None else y + shift.to(kind)

    y = epilogue.exact(weight, product, kind)
    return y if kind == torch.float64 else y.to(x.dtype)


def in_passes(x, weight, bias=None, *, fast=False, **after):
    """Same arguments and result as the reference, rounded to x.dtype after each product.

    fast: sums in the tensor cores' own, shorter accumulators throughout (`use_fast_accum` of torch).
    """
    rows = x.data.flatten(0, -2)
    by_row = x.scales.reshape(-1, 1)

    def product(one: Quantized, shift):
        y = torch._scaled_mm(
            rows, one.data.t(), scale_a=by_row, scale_b=one.scales.float().view(1, -1), bias=shift, out_dtype=x.dtype,
            use_fast_accum=fast,
        )  # fmt: skip
        return y.view(*x.data.shape[:-1], -1)

    return Epilogue(bias, **after).in_passes(weight, product)


def supports(x, weight, bias=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    given = list(epilogue.weights(weight))
    if x.data.numel() == 0 or weight.data.numel() == 0:
        return "empty"
    if x.data.dtype != FP8 or x.outliers is not None or any(one.data.dtype != FP8 for one in given):
        return "numbers that are not float8, or outliers"
    if x.dtype != torch.bfloat16:
        return f"x of {x.dtype}: with scales by row torch's product gives bfloat16, not float32 or float16"
    if any(one.scales.numel() != one.data.shape[0] or one.zeros is not None for one in given):
        return "scales that are not by row of the weight, or zeros"
    if x.data.shape[-1] != weight.data.shape[1] or any(size % 16 for size in weight.data.shape):
        return f"{x.data.shape[-1]} inputs and a weight {tuple(weight.data.shape)}, not multiples of 16"
    if (reason := epilogue.refusal(weight.data)) is not None:
        return reason
    if not all(tensor.is_contiguous() for tensor in (x.data, x.scales, *(one.data for one in given))):
        return "not contiguous"
    if any(shift is not None and shift.dtype != x.dtype for shift in (bias, epilogue.up_bias, epilogue.residual)):
        return "bias or residual of another dtype than x"
    return float8_reason(x.data.device, FP8)


_case = partial(product_case, weight=partial(quantize_weight, dtype=FP8), rows=partial(quantize, dtype=FP8))
CASES = (
    _case("tiny", (3, 32), n=16, small=True),
    _case("bias-residual", (2, 17, 144), n=48, bias=True, residual=True, small=True),
    _case("gate", (5, 64), n=32, gate=True, bias=True, activation="silu", small=True),
    _case("llama-qkv", (2048, 4096), n=6144),
    _case("llama-gate-up", (2048, 4096), n=14336, gate=True, activation="silu"),
    _case("llama-down", (2048, 14336), n=4096, residual=True),
)

fp8_linear = Op("fp8_linear", reference, "accel_kernels.gemm.fp8_linear:in_passes", supports, CASES)
