"""The op `fused_linear` with a weight in the blocks of a library, read as they lie.

For more rows than kernels take, the weight is written out in the dtype of x and cuBLAS multiplies.
"""

import torch

from accel_kernels.device import interpreted, is_hopper
from accel_kernels.gemm.blocks.block_weight import block_reason
from accel_kernels.gemm.blocks.bytewise import Bytewise, quantized_of
from accel_kernels.gemm.blocks.dequantize_blocks import bytewise_case, codebook_case, dequantize_blocks, ggml_case
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes
from accel_kernels.gemm.quantized.quantized_linear import quantized_linear
from accel_kernels.gemm.quantized_weight import MOST_QUANTIZED_ROWS
from accel_kernels.norm.norm import norm_reason, norm_weights
from accel_kernels.op import dtype_reason, make_op
from accel_kernels.product_cases import product_case

MOST_GROUPED_ROWS = 64  # of numbers of 8 bits whose columns have scales by group: 128 took four times bf16's time
MOST_BLOCK_ROWS = 16  # of x, up to which reading the blocks is faster than writing the weight out, as measured


def reference(x, weight, bias=None, *, norm=None, **after):
    """x: (..., K); weight, up: `BlockWeight` (N, K); all else, and the result, as of `quantized_linear`."""
    return quantized_linear.reference(x, weight, bias, norm=norm, **after)


def in_passes(x, weight, bias=None, *, norm=None, up=None, **after):
    """The same by the kernels of our own formats, where bytes are numbers of one; else with cuBLAS's products of
    weights written out for this one call.
    """
    if x.dtype != torch.float32 and x.numel() <= MOST_QUANTIZED_ROWS * x.shape[-1]:
        ours = [quantized_of(one) for one in (weight, up) if one is not None]
        few = x.numel() <= MOST_GROUPED_ROWS * x.shape[-1]
        if all(one is not None and (few or one.scales.shape[1] == 1) for one in ours):
            return quantized_linear(x, ours[0], bias, norm=norm, **({} if up is None else {"up": ours[1]}), **after)
    wide = None if up is None else dequantize_blocks(up, x.dtype)
    return full_in_passes(x, dequantize_blocks(weight, x.dtype), bias, norm=norm, up=wide, **after)


def fragment_reason(x, weight, up) -> str | None:
    """Why kernels that read blocks as factors of the tensor cores are not chosen, for what `supports` does.

    They ran on compute capability 9.0 alone, a row of x with up to 14,336 columns.
    """
    (n, k), source = weight.shape, weight.format.source
    if not source:
        return f"{weight.format.name}, which they do not know"
    if x.dtype == torch.float32 or not is_hopper(x.device):
        return f"rows of {x.dtype} on {x.device}"
    if k % (512 if source == "sixes" else 256) or k > 1 << 14 or n * k >= 1 << 31:
        return f"{n} x {k} numbers"
    if source == "table" and weight.side.shift == 0:
        return "a scale to 32 columns"
    if any(t is not None and t.data_ptr() % 16 for t in (x, weight.data, up and up.data)):
        return "x or a weight not at a multiple of 16 bytes"
    return None


def supports(x, weight, bias=None, *, norm=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    residual = epilogue.residual
    if x.numel() == 0:
        return "empty"
    if (reason := epilogue.refusal(weight.data)) is not None:
        return reason
    if isinstance(weight.side, Bytewise) and not interpreted():
        return "numbers of a byte: of one row Triton 3.6 makes a wrong kernel"
    if epilogue.up is not None and epilogue.up.kind != weight.kind:
        return "a gate of another shape or format"
    if (reason := norm_reason(norm)) is not None:
        return reason
    if x.shape[-1] != weight.columns or not x.is_contiguous():
        return f"x not contiguous, or not of {weight.columns} columns"
    reason = next((reason for one in epilogue.weights(weight) if (reason := block_reason(one))), None)
    if reason is not None:
        return reason
    if residual is not None and (not residual.is_contiguous() or residual.dtype != x.dtype):
        return "residual not contiguous, or of another dtype"
    if (rows := x.numel() // weight.columns) > (512 if interpreted() and x.dtype != torch.float32 else MOST_BLOCK_ROWS):
        return f"{rows} rows of {x.dtype}, more than kernels take"
    return dtype_reason(x, bias, epilogue.up_bias, residual, *norm_weights(norm))


def _case(name, rows, k, n, format="nf4", size=64, *, nested=False, **more):
    def weight(full):
        return codebook_case(full, format, size, nested)

    return product_case(name, (rows, k), n, weight=weight, **more)


def _ggml(name, rows, k, n, format, compute=torch.float32, **more):
    return product_case(name, (rows, k), n, weight=lambda full: ggml_case(full, format, compute), **more)


def _fp8(name, rows, k, n, **more):
    return product_case(name, (rows, k), n, weight=lambda full: bytewise_case(full, 128, 128), **more)


CASES = (
    _fp8("fp8-rms", 1, 416, 141, norm="rms", small=True),
    _ggml("q4_k", 1, 512, 21, "Q4_K", norm="rms", gate=True, activation="silu", small=True),
    _ggml("q4_k-half-rows-9-gate", 9, 768, 37, "Q4_K", torch.float16, gate=True, activation="silu", bias=True),
    _ggml("q8_0", 1, 768, 45, "Q8_0", norm="rms", residual=True, scale=0.5),
    _ggml("q8_0-rows-3-gate", 3, 256, 21, "Q8_0", gate=True, activation="silu"),
    _ggml("q6_k-gate", 1, 1024, 21, "Q6_K", norm="gemma", gate=True, activation="silu"),
    _ggml("q6_k-rows-16", 16, 5120, 71, "Q6_K", bias=True),
    _case("fp4-1280", 1, 1280, 37, "fp4", norm="rms", residual=True),
    _case("nf4-rows-13-256", 13, 768, 77, size=256, nested=True, gate=True, activation="silu", bias=True),
    _ggml("q6_k-rows-5", 5, 512, 33, "Q6_K", residual=True, small=True),
    _ggml("q8_0-half-rows-17", 17, 96, 35, "Q8_0", torch.float16, bias=True, activation="gelu_tanh", small=True),
    _case("nf4", 1, 96, 37, size=32, small=True),
    _case("fp4-rms", 1, 192, 21, "fp4", norm="rms", residual=True, scale=0.5, small=True),
    _case("nf4-nested-gate-bias", 1, 1088, 13, nested=True, norm="gemma", gate=True, bias=True, activation="silu",
          small=True),
    _case("nf4-layer-bias", 1, 128, 19, size=128, norm="layer", bias=True, activation="gelu_tanh", small=True),
    _case("fp4-rows-2", 2, 96, 35, "fp4", 256, bias=True, residual=True, small=True),
    _case("nf4-rows-5-nested-gate", 5, 192, 33, nested=True, norm="rms", gate=True, activation="silu", small=True),
    _case("nf4-rows-17", 17, 128, 35, size=128, norm="layer", bias=True, activation="gelu", small=True),
    _case("fp4-rows-33-gate", 33, 160, 21, "fp4", 32, gate=True, activation="silu", small=True),
    _case("nf4-rows-70-nested", 70, 192, 35, nested=True, norm="rms", residual=True, scale=0.5, small=True),
    *(
        _case(f"llama-{name}-{rows}", rows, k, n, nested=True, **more)
        for rows in (1, 2, 16, 128, 512)
        for name, k, n, more in (
            ("q", 4096, 4096, {"norm": "rms"}),
            ("gate-up", 4096, 14336, {"norm": "rms", "gate": True, "activation": "silu"}),
            ("down", 14336, 4096, {"residual": True}),
        )
    ),
)  # fmt: skip

block_linear = make_op("block_linear", reference, supports, CASES, instead=in_passes)
