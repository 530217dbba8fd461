"""Quantized weights written out: each number read once, its value in 16 bits or 32 written once."""

import torch
import triton
import triton.language as tl

from accel_kernels.device import float8_reason
from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.dequantize_blocks_triton import dequantize_blocks
from accel_kernels.gemm.quantized.operands.unpacking_triton import factor, unpack_mode, wide_scale
from accel_kernels.gemm.quantized_weight import scale_bits
from accel_kernels.warmup import launch

BLOCK_N, BYTES, WARPS = 8, 512, 4  # rows, and bytes of a row, of a program
EXACT = {torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=("n",))
def dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, y_ptr, n, words,
    GROUPS: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr, FORMAT: tl.constexpr,
    EXACT: tl.constexpr, UNPACK_MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = (row < n)[:, None] & (word < words)[None, :]
    at = row.to(tl.int64)[:, None] * words + word[None, :]
    packed = tl.load(words_ptr + at, mask=inside, other=0)
    numbers = factor(packed[None, :, :], FORMAT, EXACT, UNPACK_MODE).reshape(BLOCK_N, BLOCK_W, PER_WORD).to(tl.float32)
    if GROUPS == 1:
        scale = wide_scale(tl.load(scales_ptr + row, mask=row < n, other=0.0))[:, None, None]
        if zeros_ptr is not None:
            numbers -= tl.load(zeros_ptr + row, mask=row < n, other=0).to(tl.float32)[:, None, None]
    else:
        group = row[:, None] * GROUPS + (word // WORDS)[None, :]
        scale = wide_scale(tl.load(scales_ptr + group, mask=inside, other=0.0))[:, :, None]
        if zeros_ptr is not None:
            numbers -= tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.float32)[:, :, None]
    values = (numbers * scale).to(y_ptr.dtype.element_ty).reshape(BLOCK_N, BLOCK_W * PER_WORD)
    column = tl.program_id(1) * BLOCK_W * PER_WORD + tl.arange(0, BLOCK_W * PER_WORD)
    columns = words * PER_WORD
    inside = (row < n)[:, None] & (column < columns)[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], values, mask=inside)


def dequantize(weight, dtype):
    """Same arguments and result as the reference. Cards without float8 convert it by its bits."""
    if isinstance(weight, BlockWeight):
        return dequantize_blocks(weight, dtype)
    n, k = weight.shape
    y = torch.empty((n, k), device=weight.data.device, dtype=dtype)
    packed = weight.data.view(torch.int32)
    words, groups = packed.shape[1], weight.scales.shape[1]
    block, bits = BYTES // 4, float8_reason(weight.data.device, weight.data.dtype) is not None
    launch(
        dequantize_kernel, (triton.cdiv(n, BLOCK_N), triton.cdiv(words, block)),
        packed, scale_bits(weight), weight.zeros, y, n, words,
        GROUPS=groups, WORDS=words // groups, PER_WORD=k // words, FORMAT=weight.format.name,
        EXACT=EXACT[weight.format.exact], UNPACK_MODE="plain" if bits else unpack_mode(weight.format.exact),
        BLOCK_N=BLOCK_N, BLOCK_W=block, num_warps=WARPS,
    )  # fmt: skip
    return y
