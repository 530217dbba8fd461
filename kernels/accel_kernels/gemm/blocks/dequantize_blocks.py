"""A weight in blocks written out in the dtype of a product: one pass, before cuBLAS multiplies many rows by it."""

import torch

from accel_kernels.gemm.blocks.block_weight import BlockWeight, block_reason
from accel_kernels.gemm.blocks.bytewise import BF16, FP8, INT8, Bytewise
from accel_kernels.gemm.blocks.codebook import CODEBOOKS, NESTED, PIECE, Codebook
from accel_kernels.gemm.blocks.ggml import GGML
from accel_kernels.op import FLOATS, dtype_reason, make_op, random_cases


def reference(weight, dtype):
    """weight: `BlockWeight` (N, K). Returns (N, K) in dtype, equal to the library's own to the bit."""
    return weight.dequantized(dtype)


def supports(weight, dtype) -> str | None:
    if dtype not in FLOATS:
        return f"dtype {dtype} is not float16, bfloat16 or float32"
    return block_reason(weight) or dtype_reason(torch.empty(0, dtype=dtype, device=weight.data.device))


def codebook_case(full: torch.Tensor, name: str, size: int, nested: bool) -> BlockWeight:
    """Any weight in the shape of `full`, about as large; size: numbers to a scale."""
    device, shift = full.device, (size // PIECE).bit_length() - 1
    data = (full * 1e4).int().bitwise_and(255).to(torch.uint8)[:, ::2].contiguous()
    scales = -(-full.numel() // size)
    absmax = full.flatten()[:scales].abs().float() + full.shape[1] ** -0.5
    code = torch.linspace(-1, 1, 16, device=device)
    if not nested:
        return BlockWeight(data, full.shape[1], CODEBOOKS[name], side=Codebook(code, absmax, shift))
    outer = absmax[: -(-scales // NESTED)].contiguous()
    places, code2 = (absmax * 1e4).int().bitwise_and(255).to(torch.uint8), torch.linspace(-1, 1, 256, device=device)
    side = Codebook(code, places, shift, code2, outer, 2 * absmax[0])
    return BlockWeight(data, full.shape[1], CODEBOOKS[name], side=side)


def ggml_case(full: torch.Tensor, name: str, compute: torch.dtype = torch.float32) -> BlockWeight:
    """Any weight in the shape of `full`; scales of 16 bits are small, so that no value is far from 0."""
    format, k = GGML[name], full.shape[1]
    row = k // format.columns * format.bytes
    data = (full.repeat(1, 2)[:, :row] * 1e4).int().bitwise_and(255).to(torch.uint8).contiguous()
    for first in (format.scale, format.minimum):
        if first is not None:
            data.view(-1, format.bytes)[:, first + 1] &= 0x0F
    return BlockWeight(data, k, format, compute)


def bytewise_case(full: torch.Tensor, tall: int, wide: int, whole: bool = False, powers: bool = False) -> BlockWeight:
    """Any weight in the shape of `full`, with a scale to each block of so many rows and columns. whole: int8 with
    zeros, else float8. powers: scales are powers of two.
    """
    n, k = full.shape
    scales = full[: -(-n // tall), : -(-k // wide)].abs().float().contiguous() / 64
    zeros = (scales * 1e5).int().remainder(9).sub(4).to(torch.int8) if whole else None
    scales = scales.mul(1e4).int().remainder(5).add(115).to(torch.uint8) if powers else scales
    numbers = (full * 1e4).int().remainder(255).sub(127).to(torch.int8)
    data = numbers if whole else numbers.bitwise_and(-9).view(torch.uint8)  # of float8 none is without a value
    side = Bytewise.of(scales, zeros, (n, k), (tall, wide))
    return BlockWeight(data.view(torch.uint8), k, INT8 if whole else FP8, side=side)


@random_cases
def _bytewise(rand, n, k, *sizes, **more):
    return (bytewise_case(rand(n, k, spread=k**-0.5), *sizes, **more), rand.dtype), {}


@random_cases
def _bfloat16(rand, n, k):
    data = rand(n, k, spread=k**-0.5).bfloat16().view(torch.uint8)
    return (BlockWeight(data, k, BF16), rand.dtype), {}


@random_cases
def _ggml(rand, n, k, name, compute=torch.float32):
    return (ggml_case(rand(n, k, spread=k**-0.5), name, compute), rand.dtype), {}


@random_cases
def _case(rand, n, k, name, size=64, nested=False):
    return (codebook_case(rand(n, k, spread=k**-0.5), name, size, nested), rand.dtype), {}


CASES = (
    _case("nf4", 5, 96, "nf4", 32, small=True),
    _case("nf4-nested", 9, 1088, "nf4", nested=True, small=True),
    _case("fp4-over-row-ends", 7, 96, "fp4", 256, small=True),
    *(
        _ggml(name.lower(), 5, 512, name, (torch.float32, torch.float16)[at % 2], small=True)
        for at, name in enumerate(GGML)
    ),
    _bytewise("fp8", 35, 416, 16, 128, small=True),
    _bytewise("fp8-powers", 9, 96, 1, 32, powers=True, small=True),
    _bytewise("int8", 7, 96, 1, 96, whole=True, small=True),
    _bfloat16("bf16", 5, 96, small=True),
    _case("llama-gate-nf4", 14336, 4096, "nf4", nested=True),
    _case("flux-mlp-fp4", 12288, 3072, "fp4"),
)

dequantize_blocks = make_op("dequantize_blocks", reference, supports, CASES)
