"""The op `fused_linear` with weights in fewer bits: a decode step takes the less time the less it reads.

Kernels read numbers and scales as they were saved, by us or in the blocks of a library, and multiply in registers; x
keeps its 16 bits. For more rows than they take, the weight is written out in the dtype of x and cuBLAS multiplies.
"""

from typing import Any

import torch
import torch.nn.functional as F

from accel_kernels.device import float8_reason
from accel_kernels.gemm.blocks.affine import affine_case
from accel_kernels.gemm.blocks.codebook import codebook_case
from accel_kernels.gemm.blocks.ggml import ggml_case
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes
from accel_kernels.gemm.quantized.dequantize import dequantize
from accel_kernels.gemm.quantized_weight import Quantized, quantize_weight
from accel_kernels.norm import norm as norms
from accel_kernels.norm.norm import norm_reason, norm_weights
from accel_kernels.op import Case, dtype_reason, make_op
from accel_kernels.product_cases import product_case

CPU_ROWS = 32  # beyond, a CPU is faster with the weight written out
# Torch's product on a CPU takes so many bytes of x and of the weight, and so many scales, at a time. It does not check
# that they are there, or aligned to that.
CPU_X_BYTES, CPU_WEIGHT_BYTES, CPU_SCALES = 32, 16, 4


def reference(x, weight, bias=None, *, norm=None, **after):
    """x: (..., K); weight, up: `Quantized` or `BlockWeight` (N, K); all else, and the result, as of `fused_linear`.

    The weight is rounded once to the dtype of x; sums as torch does them.
    """
    h = x if norm is None else norms.reference(x, norm)
    return Epilogue(bias, **after).exact(weight, lambda one, shift: F.linear(h, one.dequantized(x.dtype), shift))


def in_passes(x, weight, bias=None, *, norm=None, up=None, **after):
    """The same with cuBLAS's products of weights written out for this one call."""
    wide = None if up is None else dequantize(up, x.dtype)
    return full_in_passes(x, dequantize(weight, x.dtype), bias, norm=norm, up=wide, **after)


def on_cpu(x, weight, bias=None, *, norm=None, **after):
    """The same by torch's own product of bf16 and int8 where that takes less time than writing the weight out."""
    epilogue = Epilogue(bias, **after)
    if not all(_multiplies_bytes(x, one) for one in epilogue.weights(weight)):
        return reference(x, weight, bias, norm=norm, **after)
    h = x if norm is None else norms.reference(x, norm)
    return epilogue.exact(weight, lambda one, shift: _product_of_bytes(h, one, shift))


def _multiplies_bytes(x: torch.Tensor, weight: Any) -> bool:
    """Symmetric int8 by row; float32 and float16 are slower there, and float32 scales are read as bfloat16."""
    return (
        weight.format.name == "int8"
        and weight.order is None
        and x.device.type == weight.data.device.type == "cpu"
        and x.dtype == weight.scales.dtype == torch.bfloat16
        and weight.zeros is None
        and weight.scales.shape[1] == 1
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % CPU_WEIGHT_BYTES == 0
        and weight.shape[0] % CPU_SCALES == 0
        and weight.data.is_contiguous()
        and 0 < x.numel() <= CPU_ROWS * x.shape[-1]
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def _product_of_bytes(h: torch.Tensor, weight: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    rows = _placed(h.reshape(-1, h.shape[-1]).contiguous(), CPU_X_BYTES)
    y = torch._weight_int8pack_mm(rows, _placed(weight.data, CPU_WEIGHT_BYTES), weight.scales.reshape(-1))
    y = y.view(*h.shape[:-1], -1)
    return y if bias is None else y + bias


def _placed(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Aligned to `step` bytes, a copy where it is not: results do not depend on where a weight lies."""
    return tensor.clone() if tensor.data_ptr() % step else tensor


def supports(x, weight, bias=None, *, norm=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    up, residual = epilogue.up, epilogue.residual
    rows = x.numel() // max(1, x.shape[-1])
    if x.numel() == 0:
        return "empty"
    ours = [one for one in epilogue.weights(weight) if isinstance(one, Quantized)]
    if x.dtype == torch.float32 and ours:
        return "x of float32, which numbers of fewer bits do not pay for"
    if rows > weight.most_rows:
        return f"{rows} rows, more than {weight.most_rows}"
    if (reason := epilogue.refusal(weight.data)) is not None:
        return reason
    if up is not None and up.kind != weight.kind:
        return "a gate of another shape, dtype or group"
    if (reason := norm_reason(norm)) is not None:
        return reason
    if x.shape[-1] != weight.shape[1]:
        return f"not of {weight.shape[1]} inputs"
    if up is not None and ours and up.order is not weight.order:
        return "a gate whose columns lie in another order"
    for one in epilogue.weights(weight):
        one = one._replace(order=None) if ours else one
        if (reason := one.reason() or float8_reason(one.data.device, one.data.dtype)) is not None:
            return reason
    if not x.is_contiguous() or x.data_ptr() % 8:
        return "x not contiguous, or not at a multiple of 8 bytes"
    if residual is not None and (not residual.is_contiguous() or residual.dtype != x.dtype):
        return "residual not contiguous, or of another dtype"
    scales = [one.scales for one in ours]
    return dtype_reason(x, bias, epilogue.up_bias, residual, *scales, *norm_weights(norm), products=rows > 16)


def _case(name, rows, k, n, kind=torch.int32, group=0, *, zeros=False, **more):
    def weight(full):
        return quantize_weight(full + (0.5 * k**-0.5 if zeros else 0.0), kind, group, zeros)

    return product_case(name, (rows, k), n, weight=weight, **more)


def _codebook(name, rows, k, n, format="nf4", size=64, *, nested=False, **more):
    return product_case(name, (rows, k), n, weight=lambda full: codebook_case(full, format, size, nested), **more)


def _affine(name, rows, k, n, group=96, **more):
    return product_case(name, (rows, k), n, weight=lambda full: affine_case(full, group), **more)


def _ggml(name, rows, k, n, format, compute=torch.float32, **more):
    return product_case(name, (rows, k), n, weight=lambda full: ggml_case(full, format, compute), **more)


def _ordered(case):
    def make(device, dtype):
        (x, weight, bias), more = case.make(device, dtype)
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0), device="cpu").int().to(device)
        more |= {"up": more["up"]._replace(order=order)} if "up" in more else {}
        return (x, weight._replace(order=order), bias), more

    return Case(f"{case.name}-order", make, case.small)


LLAMA = (
    ("qkv", 4096, 6144, {"norm": "rms"}),
    ("gate-up", 4096, 14336, {"norm": "rms", "gate": True, "activation": "silu"}),
    ("down", 14336, 4096, {"residual": True}),
)
INT8, INT4, FP8 = torch.int8, torch.int32, torch.float8_e4m3fn
CASES = (
    _case("int8", 1, 64, 48, INT8, small=True),
    _case("int8-rms", 1, 1032, 21, INT8, norm="rms", residual=True, small=True),
    _case("int8-group-zeros", 1, 192, 13, INT8, 32, zeros=True, norm="gemma", small=True),
    _case("int8-layer-bias-gelu", 1, 104, 50, INT8, norm="layer", bias=True, activation="gelu_tanh", small=True),
    _case("int8-gate-bias", 1, 72, 37, INT8, gate=True, bias=True, activation="gelu", small=True),
    _case("int8-rows-3", 3, 88, 41, INT8, norm="rms", residual=True, scale=0.5, small=True),
    _case("int8-rows-17-gate", 17, 136, 35, INT8, norm="layer", gate=True, activation="silu", small=True),
    _case("int8-rows-2-group-zeros", 2, 192, 33, INT8, 64, zeros=True, small=True),
    _case("int4", 1, 64, 48, small=True),
    _case("int4-odd", 1, 136, 33, norm="rms", residual=True, scale=0.5, small=True),
    _case("int4-32", 1, 192, 37, INT4, 32, norm="rms", gate=True, activation="silu", small=True),
    _case("int4-64-zeros", 1, 448, 19, INT4, 64, zeros=True, bias=True, activation="relu2", small=True),
    _case("int4-128-gate-zeros", 1, 1280, 13, INT4, 128, zeros=True, norm="layer", gate=True, bias=True,
          activation="gelu", small=True),
    _case("int4-rows-2", 2, 72, 33, norm="rms", small=True),
    _case("int4-rows-5-32-zeros", 5, 160, 35, INT4, 32, zeros=True, residual=True, small=True),
    _case("int4-rows-17-64-gate", 17, 192, 33, INT4, 64, norm="layer", gate=True, bias=True, activation="silu",
          small=True),
    _case("int4-rows-33-128-gate-zeros", 33, 384, 21, INT4, 128, zeros=True, gate=True, activation="relu", small=True),
    # As above with columns enough for products in registers, every way of scales.
    _case("int4-64-residual", 1, 256, 35, INT4, 64, residual=True, small=True),
    _case("int8-rows-3-gemma", 3, 192, 35, INT8, norm="gemma", residual=True, small=True),
    _case("int8-rows-4-32-zeros", 4, 128, 35, INT8, 32, zeros=True, norm="rms", small=True),
    _case("int8-rows-16-layer-gate", 16, 320, 37, INT8, norm="layer", gate=True, bias=True, activation="gelu",
          small=True),
    _case("int4-rows-2-rms-gate", 2, 384, 37, INT4, 128, norm="rms", gate=True, activation="silu", small=True),
    _case("int4-rows-7-128-zeros", 7, 512, 35, INT4, 128, zeros=True, bias=True, small=True),
    _case("int4-rows-5-32-zeros-wide", 5, 256, 35, INT4, 32, zeros=True, norm="rms", residual=True, small=True),
    _case("int4-rows-9-64", 9, 256, 50, INT4, 64, gate=True, activation="relu2", small=True),
    _case("int4-rows-4-by-row", 4, 256, 19, INT4, activation="gelu_tanh", scale=0.5, small=True),
    _case("int4-rows-40-32", 40, 192, 35, INT4, 32, zeros=True, residual=True, small=True),
    _case("fp8-rows-3-gate", 3, 192, 35, FP8, norm="rms", gate=True, activation="silu", small=True),
    _case("int8-rows-70", 70, 192, 35, INT8, norm="rms", residual=True, small=True),
    _case("int8-rows-66-32-zeros", 66, 160, 35, INT8, 32, zeros=True, bias=True, scale=0.5, small=True),
    _case("int8-rows-65-gate-zeros", 65, 136, 33, INT8, zeros=True, gate=True, activation="silu", small=True),
    _case("int4-rows-130", 130, 104, 37, INT4, activation="gelu_tanh", small=True),
    _case("int4-rows-67-64-gate-zeros", 67, 192, 33, INT4, 64, zeros=True, norm="layer", gate=True, bias=True,
          activation="gelu", small=True),
    _case("int4-rows-65-32", 65, 224, 35, INT4, 32, residual=True, small=True),
    _case("fp8-rows-68-gate", 68, 136, 35, FP8, norm="rms", gate=True, activation="silu", small=True),
    _case("fp8-rows-64", 64, 128, 50, FP8, residual=True, small=True),
    _case("fp8", 1, 88, 33, FP8, norm="rms", residual=True, small=True),
    _case("fp8-gate", 1, 64, 37, FP8, gate=True, bias=True, activation="gelu", small=True),
    _case("fp8-128-gate", 1, 512, 35, FP8, 128, norm="rms", gate=True, activation="silu", small=True),
    _case("fp8-rows-5-128", 5, 256, 37, FP8, 128, norm="rms", residual=True, small=True),
    _case("fp8-rows-66-128", 66, 256, 35, FP8, 128, bias=True, small=True),
    _case("fp8-rows-9", 9, 96, 35, FP8, norm="layer", gate=True, activation="silu", small=True),
    _ordered(_case("int4-odd-gate", 1, 136, 33, norm="rms", gate=True, bias=True, activation="silu", small=True)),
    _ordered(_case("int8-rows-9", 9, 192, 35, INT8, norm="layer", residual=True, small=True)),
    _ordered(_case("int4-rows-5-64-gate", 5, 1280, 83, INT4, 64, norm="rms", gate=True, activation="silu")),
    _ordered(_case("int4-rows-12-128-zeros", 12, 512, 50, INT4, 128, zeros=True, norm="layer", residual=True)),
    *(_ordered(_case(f"llama-{name}-int4", 1, k, n, INT4, 128, **more)) for name, k, n, more in LLAMA),
    *(
        _case(f"llama-{name}-{label}-{rows}", rows, k, n, kind, group, **more)
        for label, kind, group in (("int8", INT8, 0), ("int4", INT4, 128), ("fp8", FP8, 0))
        for rows in (1, 2, 32, 128, 256)
        for name, k, n, more in LLAMA
    ),
    _case("llama-gate-up-int4-zeros", 1, 4096, 14336, INT4, 128, zeros=True, norm="rms", gate=True, activation="silu"),
    _ggml("q4_k", 1, 512, 21, "Q4_K", norm="rms", gate=True, activation="silu", small=True),
    _ggml("q4_k-half-rows-9-gate", 9, 768, 37, "Q4_K", torch.float16, gate=True, activation="silu", bias=True),
    _ggml("q8_0", 1, 768, 45, "Q8_0", norm="rms", residual=True, scale=0.5),
    _ggml("q8_0-rows-3-gate", 3, 256, 21, "Q8_0", gate=True, activation="silu"),
    _ggml("q6_k-gate", 1, 1024, 21, "Q6_K", norm="gemma", gate=True, activation="silu"),
    _ggml("q6_k-rows-16", 16, 5120, 71, "Q6_K", bias=True),
    _codebook("fp4-1280", 1, 1280, 37, "fp4", norm="rms", residual=True),
    _codebook("nf4-rows-13-256", 13, 768, 77, size=256, nested=True, gate=True, activation="silu", bias=True),
    _ggml("q6_k-rows-5", 5, 512, 33, "Q6_K", residual=True, small=True),
    _ggml("q8_0-half-rows-16", 16, 96, 35, "Q8_0", torch.float16, bias=True, activation="gelu_tanh", small=True),
    _affine("int4-affine", 1, 192, 37, norm="rms", residual=True, small=True),
    _affine("int4-affine-rows-3-gate", 3, 96, 21, gate=True, activation="silu", bias=True, small=True),
    _affine("int4-affine-128-gate", 1, 1280, 21, 128, norm="rms", gate=True, activation="silu"),
    _affine("int4-affine-64-rows-11-gate", 11, 768, 77, 64, gate=True, activation="silu", bias=True),
    _affine("int4-affine-32", 1, 512, 45, 32, norm="rms", residual=True),
    _affine("int4-affine-32-rows-13-gate", 13, 768, 37, 32, gate=True, activation="silu"),
    _affine("int4-affine-128-rows-37", 37, 1024, 50, 128, residual=True, activation="gelu_tanh"),
    _ggml("q6_k-rows-23-gate", 23, 512, 33, "Q6_K", gate=True, activation="silu"),
    _codebook("nf4-rows-64", 64, 256, 40, bias=True),
    _codebook("nf4-rows-150-gate", 150, 768, 520, nested=True, norm="rms", gate=True, activation="silu", bias=True),
    _affine("int4-affine-rows-77", 77, 1280, 136, 128, residual=True, scale=0.5),
    _ggml("q4-k-rows-250", 250, 1024, 17000, "Q4_K", residual=True, bias=True),
    _ggml("q8-0-rows-33-gate", 33, 320, 264, "Q8_0", gate=True, activation="gelu_tanh"),
    _affine("int4-affine-256-rows-2", 2, 5120, 71, 256, residual=True),
    _codebook("nf4", 1, 96, 37, size=32, small=True),
    _codebook("fp4-rms", 1, 192, 21, "fp4", norm="rms", residual=True, scale=0.5, small=True),
    _codebook("nf4-nested-gate-bias", 1, 1088, 13, nested=True, norm="gemma", gate=True, bias=True, activation="silu",
          small=True),
    _codebook("nf4-layer-bias", 1, 128, 19, size=128, norm="layer", bias=True, activation="gelu_tanh", small=True),
    _codebook("fp4-rows-2", 2, 96, 35, "fp4", 256, bias=True, residual=True, small=True),
    _codebook("nf4-rows-5-nested-gate", 5, 192, 33, nested=True, norm="rms", gate=True, activation="silu", small=True),
    *(
        _codebook(f"llama-{name}-nf4-{rows}", rows, k, n, nested=True, **more)
        for rows in (1, 2, 16, 128, 512)
        for name, k, n, more in LLAMA
    ),
    _case("qwen-0.5b-qkv-int4", 1, 896, 1152, INT4, 32, norm="rms", bias=True),
)  # fmt: skip

quantized_linear = make_op("quantized_linear", reference, supports, CASES, instead=in_passes, on_cpu=on_cpu)
