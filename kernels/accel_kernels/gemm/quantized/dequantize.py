"""A quantized weight written out in the dtype of a product: one pass, before cuBLAS multiplies many rows by it."""

import torch

from accel_kernels.gemm.quantized_weight import quantize_weight, weight_reason
from accel_kernels.op import FLOATS, dtype_reason, make_op, random_cases


def reference(weight, dtype):
    """weight: Quantized (N, K). Returns (N, K) in dtype, rounded once from float32."""
    return weight.dequantized(dtype)


def supports(weight, dtype) -> str | None:
    if weight.data.numel() == 0:
        return "empty"
    if dtype not in FLOATS:
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    if weight.shape[1] % 8:
        return f"{weight.shape[1]} columns, not a multiple of 8"
    return weight_reason(weight) or dtype_reason(weight.scales, torch.empty(0, dtype=dtype, device=weight.data.device))


@random_cases
def _case(rand, n, k, kind, group=0, zeros=False):
    weight = rand(n, k, spread=k**-0.5, mean=0.5 * k**-0.5 if zeros else 0.0)
    return (quantize_weight(weight, kind, group, zeros), rand.dtype), {}


INT8, INT4, FP8 = torch.int8, torch.int32, torch.float8_e4m3fn
CASES = (
    _case("int8", 5, 72, INT8, small=True),
    _case("int8-zeros", 9, 1032, INT8, zeros=True, small=True),
    _case("int8-groups", 17, 192, INT8, 32, zeros=True, small=True),
    _case("int4", 7, 88, INT4, small=True),
    _case("int4-32", 11, 1056, INT4, 32, small=True),
    _case("int4-128-zeros", 3, 1280, INT4, 128, zeros=True, small=True),
    _case("fp8", 6, 104, FP8, small=True),
    _case("sdxl-geglu-int8", 10240, 1280, INT8),
    _case("sdxl-qkv-int8", 3840, 1280, INT8),
    _case("sdxl-geglu-fp8", 10240, 1280, FP8),
    _case("llama-gate-int8", 14336, 4096, INT8),
    _case("llama-gate-int4", 14336, 4096, INT4, 128),
)

dequantize = make_op("dequantize", reference, supports, CASES)
