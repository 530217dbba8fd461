"""A linear layer for Hopper with everything that follows it in the same pass, of 16-bit or 8-bit operands.

y = residual + modulation * scale * act(x W^T + b). With a gate, act(x W^T + b) * (x U^T + c) takes the activation's
place, as in GEGLU and SwiGLU (Shazeer, "GLU variants improve transformer", 2020). 8-bit operands are numbers times
scales by row, as `int8_linear` and `fp8_linear` take them. What follows the sums is fp32 and rounded once.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from accel_kernels.device import Feature, lacks, multiprocessors
from accel_kernels.gemm.adapters.low_rank_term import LowRankTerm, with_low_rank
from accel_kernels.gemm.epilogue import Epilogue, by_part
from accel_kernels.gemm.fp8_linear import FP8, fp8_linear
from accel_kernels.gemm.fused_linear import in_passes as full_in_passes
from accel_kernels.gemm.int8_linear import MOST_COLUMNS, int8_linear
from accel_kernels.gemm.quantize_rows import QuantizedRows
from accel_kernels.gemm.quantize_rows import reference as quantize
from accel_kernels.gemm.quantized_weight import Quantized, quantize_weight
from accel_kernels.op import Case, dtype_reason, make_op
from accel_kernels.product_cases import product_case
from accel_kernels.sizes import cdiv

EIGHT_BITS = {torch.int8: int8_linear, FP8: fp8_linear}
ALIGNED = 16  # bytes, of a tensor map's base and rows
TILE = 128  # rows and columns, which belong to one part of stacked outputs
LEAST_USE = 0.75  # of the multiprocessors over all rounds (H200)


def reference(x, weight, bias=None, *, low_rank=None, rounded=False, fast=False, out=None, **after):
    """x: (..., K), weight: (N, K), of one dtype of 16 bits; or QuantizedRows (..., K), Quantized (N, K), scales (N, 1).

    Returns (..., N) of x.dtype. low_rank: a `LowRankTerm` beside 16 bits, `shared` with a gate, or None. bias, after:
    the fields of `Epilogue`, `up` of the kind of the weight. out: where it is written and what is returned, if given.
    Two arguments change only what the kernel does. rounded: it rounds to x.dtype after the product, activation, gate,
    scale and modulation too, as separate passes do. fast: float8 may be summed in the tensor cores' own, shorter
    accumulators; the kernel has no other way.
    """
    if isinstance(x, QuantizedRows):
        return EIGHT_BITS[x.data.dtype].reference(x, weight, bias, **after)
    product = with_low_rank(lambda one, shift: F.linear(x, one, shift), x, low_rank, after.get("up"))
    y = Epilogue(bias, **after).exact(weight, product)
    return y if out is None else out.copy_(y)


def in_passes(x, weight, bias=None, *, rounded=False, fast=False, out=None, modulation=None, residual=None, **after):
    """The same with the library's products, and passes for what follows them."""
    if not isinstance(x, QuantizedRows):
        y = full_in_passes(x, weight, bias, modulation=modulation, residual=residual, **after)
        return y if out is None else out.copy_(y)
    other = EIGHT_BITS[x.data.dtype]
    if modulation is None:
        return other(x, weight, bias, residual=residual, **after)
    return by_part(other(x, weight, bias, **after), modulation, residual)


def supports(x, weight, bias=None, *, low_rank=None, rounded=False, fast=False, out=None, **after) -> str | None:
    epilogue = Epilogue(bias, **after)
    if not x.is_cuda:
        return "not on a GPU: no interpreter runs this kernel"
    numbers = x.data if isinstance(x, QuantizedRows) else x
    if (reason := lacks(numbers.device, Feature.WARPGROUPS, Feature.TMA)) is not None:
        return reason
    weights = [one.data if isinstance(one, Quantized) else one for one in epilogue.weights(weight)]
    if numbers.numel() == 0 or weights[0].numel() == 0:
        return "empty"
    if any(one.dim() != 2 or one.shape[1] != numbers.shape[-1] for one in weights):
        return f"input {tuple(numbers.shape)} and weight {tuple(weights[0].shape)}"
    if (reason := epilogue.refusal(weights[0], modulated=True)) is not None:
        return reason
    if any(one.dtype != numbers.dtype for one in weights):
        return f"{numbers.dtype} times {weights[0].dtype}"
    if weights[0].shape[0] % 8:
        return f"{weights[0].shape[0]} outputs, not a multiple of 8"
    for name, tensor in (("x", numbers), *(("weight", one) for one in weights), ("out", out)):
        if tensor is not None and not mapped(tensor):
            return f"{name}: rows not evenly spaced at multiples of {ALIGNED} bytes"
    if isinstance(x, QuantizedRows):
        exact = "float8 in full sums, which `fp8_linear` has" if not fast and numbers.dtype == FP8 else None
        reason = exact or _scales_reason(x, list(epilogue.weights(weight)))
    else:
        reason = None if x.dtype in (torch.float16, torch.bfloat16) else f"dtype {x.dtype} is not float16 or bfloat16"
    if reason is None and low_rank is not None:
        reason = _adapters_reason(x, weight, epilogue.up, low_rank)
    return reason or _epilogue_reason(numbers, x.dtype, weights[0].shape[0], epilogue)


def mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe it as a matrix of evenly spaced rows."""
    *steps, last = tensor.stride()
    sizes = [(n, step) for n, step in zip(tensor.shape, steps, strict=False) if n > 1]
    even = all(above == n * step for (_, above), (n, step) in pairwise(sizes))
    rise = sizes[-1][1] if sizes else tensor.shape[-1]
    return even and last == 1 and not (rise * tensor.element_size() % ALIGNED or tensor.data_ptr() % ALIGNED)


def _adapters_reason(x, weight, up, low_rank: LowRankTerm) -> str | None:
    if isinstance(x, QuantizedRows):
        return "adapters beside rows in 8 bits"
    if (up is not None) != low_rank.shared:
        return "adapters of a gate with an A of their own"
    if any(end % TILE for end in low_rank.ends[:-1]):
        return f"parts that end at {low_rank.ends}, not at multiples of {TILE}"
    return low_rank.reason(x, weight.shape, up is not None)


def _scales_reason(x: QuantizedRows, weights: list[Quantized]) -> str | None:
    if x.data.dtype not in EIGHT_BITS or x.outliers is not None:
        return f"rows of {x.data.dtype}, or outliers"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"x of {x.dtype}, which numbers of fewer bits do not pay for"
    if x.data.shape[-1] > MOST_COLUMNS:
        return f"{x.data.shape[-1]} inputs, more than {MOST_COLUMNS}"
    if any(one.zeros is not None or one.scales.numel() != one.data.shape[0] for one in weights):
        return "scales that are not by row of the weight, or zeros"
    if not (x.scales.is_contiguous() and all(one.scales.is_contiguous() for one in weights)):
        return "scales not contiguous"
    return dtype_reason(x.scales, *(one.scales for one in weights))


def _epilogue_reason(x: torch.Tensor, dtype: torch.dtype, n: int, epilogue: Epilogue) -> str | None:
    residual, modulation = epilogue.residual, epilogue.modulation
    if (reason := epilogue.shape_reason(x.shape[:-1], n, dtype)) is not None:
        return reason
    if residual is not None and not mapped(residual):
        return f"residual: rows not evenly spaced at multiples of {ALIGNED} bytes"
    if modulation is not None:
        if modulation.dim() != 2 or modulation.shape[1] != n or x.numel() // x.shape[-1] % len(modulation):
            return f"modulation {tuple(modulation.shape)} of {x.numel() // x.shape[-1]} rows of {n}"
        if modulation.stride(1) != 1 or modulation.stride(0) % 8:
            return "modulation: rows not at multiples of 8 numbers"
    given = [one for one in (epilogue.bias, epilogue.up_bias, residual, modulation) if one is not None]
    if any(one.device != x.device for one in given):
        return "tensors on several devices"
    return dtype_reason(*given) if given else None


def _case(name, *shape, n, kind=None, **more) -> Case:
    """kind: of 8 bits, or None."""
    if kind is not None:
        more |= {"weight": partial(quantize_weight, dtype=kind), "rows": partial(quantize, dtype=kind)}
    return product_case(name, shape, n, **more)


GEGLU = {"gate": True, "activation": "gelu"}
CASES = (
    _case("tiny", 2, 5, 64, n=48, bias=True, residual=True, modulation=True, small=True),
    _case("odd-geglu", 3, 47, 72, n=136, bias=True, **GEGLU, small=True),
    _case("low-rank", 2, 37, 72, n=136, bias=True, residual=True, low_rank=(128, 136), rank=32, small=True),
    _case("low-rank-geglu", 3, 47, 72, n=136, bias=True, **GEGLU, low_rank=(136,), shared=True, small=True),
    _case("sdxl-qkv-low-rank", 2, 1024, 1280, n=3840, low_rank=(1280, 2560, 3840)),
    _case("flux-up-low-rank", 1, 4096, 3072, n=12288, bias=True, activation="gelu_tanh", low_rank=(12288,), rank=128),
    _case("flux-single-in", 1, 4608, 3072, n=21504, bias=True),
    _case("flux-up", 1, 4096, 3072, n=12288, bias=True, activation="gelu_tanh"),
    _case("flux-down", 1, 4096, 12288, n=3072, bias=True, modulation=True, residual=True),
    _case("sdxl-geglu", 2, 1024, 1280, n=5120, gate=True, bias=True, activation="gelu"),
    _case("llama-gate-up", 2048, 4096, n=14336, gate=True, activation="silu"),
    _case("llama-down", 2048, 14336, n=4096, residual=True),
    _case("int8-gate-up", 2048, 4096, n=14336, kind=torch.int8, gate=True, activation="silu"),
    _case("int8-down", 2048, 14336, n=4096, kind=torch.int8, residual=True),
)


def fills_gpu(rows: int, outputs: int, device: torch.device) -> bool:
    """Whether tiles of a result fill the GPU: else the library's tiles, and passes, are faster."""
    tiles, programs = cdiv(rows, TILE) * cdiv(outputs, TILE), multiprocessors(device)
    return tiles / (cdiv(tiles, programs) * programs) >= LEAST_USE


hopper_gemm = make_op("hopper_gemm", reference, supports, CASES, instead=in_passes)
