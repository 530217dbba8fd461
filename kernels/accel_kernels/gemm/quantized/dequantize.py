"""A weight in fewer bits written out in the dtype of a product: one pass, before cuBLAS multiplies many rows by it."""

import torch

from accel_kernels.gemm.blocks.affine import affine_case
from accel_kernels.gemm.blocks.codebook import codebook_case
from accel_kernels.gemm.blocks.ggml import GGML, ggml_case
from accel_kernels.gemm.quantized_weight import mxfp4_weight, quantize_weight
from accel_kernels.op import FLOATS, dtype_reason, make_op, random_cases


def reference(weight, dtype):
    """A `Quantized` or `BlockWeight` (N, K) in dtype, rounded once; blocks equal the library's own to the bit."""
    return weight.dequantized(dtype)


def supports(weight, dtype) -> str | None:
    if dtype not in FLOATS:
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    return weight.reason() or dtype_reason(torch.empty(0, dtype=dtype, device=weight.data.device))


@random_cases
def _case(rand, n, k, kind, group=0, zeros=False):
    weight = rand(n, k, spread=k**-0.5, mean=0.5 * k**-0.5 if zeros else 0.0)
    held = mxfp4_weight(weight) if kind == "mxfp4" else quantize_weight(weight, kind, group, zeros)
    return (held, rand.dtype), {}


@random_cases
def _blocks(rand, n, k, make, *given):
    return (make(rand(n, k, spread=k**-0.5), *given), rand.dtype), {}


INT8, INT4, FP8 = torch.int8, torch.int32, torch.float8_e4m3fn
CASES = (
    _case("int8", 5, 72, INT8, small=True),
    _case("int8-zeros", 9, 1032, INT8, zeros=True, small=True),
    _case("int8-groups", 17, 192, INT8, 32, zeros=True, small=True),
    _case("int4", 7, 88, INT4, small=True),
    _case("int4-32", 11, 1056, INT4, 32, small=True),
    _case("int4-128-zeros", 3, 1280, INT4, 128, zeros=True, small=True),
    _case("fp8", 6, 104, FP8, small=True),
    _case("mxfp4", 5, 96, "mxfp4", small=True),
    _case("sdxl-geglu-int8", 10240, 1280, INT8),
    _case("sdxl-qkv-int8", 3840, 1280, INT8),
    _case("sdxl-geglu-fp8", 10240, 1280, FP8),
    _case("llama-gate-int8", 14336, 4096, INT8),
    _case("llama-gate-int4", 14336, 4096, INT4, 128),
    _blocks("nf4", 5, 96, codebook_case, "nf4", 32, small=True),
    _blocks("nf4-nested", 9, 1088, codebook_case, "nf4", 64, True, small=True),
    _blocks("int4-affine", 5, 192, affine_case, 96, small=True),
    _blocks("fp4-over-row-ends", 7, 96, codebook_case, "fp4", 256, small=True),
    *(
        _blocks(name.lower(), 5, 512, ggml_case, name, (torch.float32, torch.float16)[at % 2], small=True)
        for at, name in enumerate(GGML)
    ),
    _blocks("llama-gate-nf4", 14336, 4096, codebook_case, "nf4", 64, True),
    _blocks("flux-mlp-fp4", 12288, 3072, codebook_case, "fp4"),
)

dequantize = make_op("dequantize", reference, supports, CASES)
