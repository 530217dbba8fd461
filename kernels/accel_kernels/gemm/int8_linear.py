"""A linear layer of 8-bit rows and an 8-bit weight, multiplied as integers, with its neighbors in the same pass.

y = residual + scale * act(x W^T + b), or with a gate act(x W^T + b) * (x U^T + c). Integer sums are exact; all else is
fp32: scales, columns of x that stayed in 16 bits (Dettmers et al., "LLM.int8()", 2022), bias, activation, residual.
"""

from functools import partial

import torch
import torch.nn.functional as F

from accel_kernels.device import Feature, lacks
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.quantize_rows import SINGLE, QuantizedRows
from accel_kernels.gemm.quantize_rows import reference as quantize
from accel_kernels.gemm.quantized_weight import Quantized, quantize_weight
from accel_kernels.op import contiguous_reason, dtype_reason, launcher, make_op
from accel_kernels.product_cases import product_case

AFTER_PRODUCT = "accel_kernels.gemm.int8_linear_triton:after_product"
MOST_COLUMNS = 131072  # 128 * 127 times as many still fits an int32


def reference(x, weight, bias=None, **after):
    """x: QuantizedRows (..., K) of int8; weight, up: Quantized int8 (N, K), scales (N, 1). Returns (..., N) of x.dtype.

    bias, after: the fields of `Epilogue`. Integers are summed exactly, all else is float32 and rounded once; for x of
    float32, which no kernel takes, both factors are multiplied as they stand for, as compressed-tensors does. Raises
    ValueError for numbers that are not int8 or scales that are not by row.
    """
    epilogue = Epilogue(bias, **after)
    for one in epilogue.weights(weight):
        if _format_reason(one) is not None:
            raise ValueError(_format_reason(one))
    if x.data.dtype != torch.int8:
        raise ValueError(f"rows of {x.data.dtype}, not int8")
    kind = torch.float64 if x.scales.dtype == torch.float64 else torch.float32
    y = epilogue.exact(weight, lambda one, shift: _product(x, one, shift, kind), kind)
    return y if kind == torch.float64 else y.to(x.dtype)


def _product(x: QuantizedRows, weight: Quantized, bias, kind: torch.dtype) -> torch.Tensor:
    if x.dtype == kind == SINGLE:
        return F.linear(x.dequantized(kind), weight.dequantized(kind), bias)
    y = integer_product(x.data.flatten(0, -2), weight.data).to(kind).view(*x.data.shape[:-1], -1)
    y = y * x.scales.to(kind)
    if x.outliers is not None:
        taken, columns = x.taken(kind)
        y = y + taken @ weight.data.index_select(1, columns).to(kind).t()
    y = y * weight.scales.to(kind).view(-1)
    return y if bias is None else y + bias.to(kind)


def integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T as int32 (M, N), exact, of int8 (M, K) and (N, K).

    Made up with zeros to sizes that cuBLAS takes; on a CPU too, where torch 2.13 gets a single column wrong.
    """
    (m, k), n = x.shape, weight.shape[0]
    if k % 16 or n % 16 or m < 32:
        x, weight = F.pad(x, (0, -k % 16, 0, max(0, 32 - m))), F.pad(weight, (0, -k % 16, 0, -n % 16))
    return torch._int_mm(x.contiguous(), weight.contiguous().t())[:m, :n]


def in_passes(x, weight, bias=None, **after):
    """The same with cuBLAS's integer product and a pass for all that follows it."""
    epilogue = Epilogue(bias, **after)
    if _reason(x, weight, epilogue) is not None or x.data.numel() == 0:
        return reference(x, weight, bias, **after)
    sums = [integer_product(x.data.flatten(0, -2), one.data) for one in epilogue.weights(weight)]
    return launcher(AFTER_PRODUCT)(x, weight, epilogue, sums)


def supports(x, weight, bias=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    if x.data.numel() == 0 or weight.data.numel() == 0:
        return "empty"
    if x.data.shape[-1] % 16:
        return f"{x.data.shape[-1]} inputs, not a multiple of 16"
    if any(t.data_ptr() % 16 for t in (x.data, *(one.data for one in epilogue.weights(weight)))):
        return "numbers not at a multiple of 16 bytes"
    return lacks(x.data.device, Feature.WIDE_PRODUCTS) or _reason(x, weight, epilogue)


def _reason(x: QuantizedRows, weight: Quantized, epilogue: Epilogue) -> str | None:
    """Why neither the one kernel nor the pass after a product takes this call."""
    k, up, residual = x.data.shape[-1], epilogue.up, epilogue.residual
    if x.data.dtype != torch.int8:
        return f"rows of {x.data.dtype}, not int8"
    if x.dtype == torch.float32:
        return "x of float32, which numbers of fewer bits do not pay for"
    for one in epilogue.weights(weight):
        if (reason := _format_reason(one)) is not None:
            return reason
    if weight.data.shape[1] != k or k > MOST_COLUMNS:
        return f"{k} inputs, and a weight of {weight.data.shape[1]}; at most {MOST_COLUMNS}"
    if (reason := epilogue.refusal(weight.data)) is not None:
        return reason
    if up is not None and up.scales.dtype != weight.scales.dtype:
        return "a gate whose scales have another dtype"
    tensors = {"x": x.data, "its scales": x.scales, "outliers": x.outliers, "weight": weight.data, "residual": residual}
    tensors |= {"scales": weight.scales} | ({} if up is None else {"up": up.data, "scales of up": up.scales})
    if (reason := contiguous_reason(**tensors)) is not None:
        return reason
    if (reason := epilogue.shape_reason(x.data.shape[:-1], weight.data.shape[0], x.dtype)) is not None:
        return reason
    return dtype_reason(x.scales, weight.scales, x.outliers, epilogue.bias, epilogue.up_bias, residual)


def _format_reason(weight: Quantized) -> str | None:
    if weight.data.dtype != torch.int8 or weight.zeros is not None:
        return f"a weight of {weight.data.dtype}{' with zeros' if weight.zeros is not None else ''}, not int8 around 0"
    if weight.scales.numel() != weight.data.shape[0]:
        return f"{weight.scales.shape[1]} scales to a row of the weight, not one"
    return None


def _case(name, *shape, n, planted=(), outliers=None, **more):
    def rows(x):
        x[..., list(planted)] *= 20
        taken = torch.tensor(outliers, device=x.device) if isinstance(outliers, tuple) else outliers
        return quantize(x, outliers=taken)

    return product_case(name, shape, n, weight=partial(quantize_weight, dtype=torch.int8), rows=rows, **more)


CASES = (
    _case("tiny", 3, 32, n=16, small=True),
    _case("odd", 2, 35, 144, n=37, bias=True, residual=True, scale=0.5, small=True),
    _case("several-tiles", 70, 272, n=150, bias=True, activation="gelu_tanh", small=True),
    _case("gate", 33, 160, n=41, gate=True, activation="silu", small=True),
    _case("gate-bias", 5, 64, n=24, gate=True, bias=True, activation="gelu", residual=True, small=True),
    _case("columns", 20, 128, n=48, planted=(5, 99), outliers=(99, 5), small=True),
    _case("threshold", 35, 96, n=40, planted=(0, 17, 95), outliers=6.0, bias=True, small=True),
    _case("threshold-gate", 9, 96, n=40, planted=(2,), outliers=6.0, gate=True, activation="silu", small=True),
    _case("many-outliers", 9, 64, n=24, planted=tuple(range(0, 64, 2)), outliers=6.0, residual=True, small=True),
    _case(
        "all-outliers", 35, 208, n=40, planted=range(0, 208, 3), outliers=6.0, gate=True, activation="silu", small=True
    ),
    _case("llama-qkv", 2048, 4096, n=6144),
    _case("llama-out", 2048, 4096, n=4096, residual=True),
    _case("llama-gate-up", 2048, 4096, n=14336, gate=True, activation="silu"),
    _case("llama-down", 2048, 14336, n=4096, residual=True, planted=(1, 77, 9000), outliers=6.0),
    _case("llama-down-all", 2048, 14336, n=4096, residual=True, planted=range(0, 14336, 7), outliers=6.0),
    _case("llama-gate-all", 300, 4096, n=14336, gate=True, activation="silu", planted=range(0, 4096, 7), outliers=6.0),
    _case("sd15-out", 2, 4096, 320, n=320, bias=True, residual=True),
    _case("sdxl-geglu", 2, 1024, 1280, n=5120, gate=True, bias=True, activation="gelu"),
    _case("llama-qkv-130", 130, 4096, n=6144, bias=True, planted=(7,), outliers=6.0),
)

int8_linear = make_op("int8_linear", reference, supports, CASES, instead=in_passes)
