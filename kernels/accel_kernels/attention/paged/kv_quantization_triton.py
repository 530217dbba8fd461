"""`accel_kernels.attention.paged.kv_quantization` in registers."""

import torch
import triton
import triton.language as tl

from accel_kernels.attention.paged.kv_quantization import LEAST, TOPS
from accel_kernels.device import interpreted
from accel_kernels.rowwise.row_numbers_triton import nearest_float8

TRITON_DTYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}
AT_LEAST = tl.constexpr(LEAST)
INT8_TOP, FLOAT8_TOP = (tl.constexpr(top) for top in TOPS.values())

# How codes become fp16 in the decode kernel, see `packing`.
BY_BITS, BY_ARITHMETIC = tl.constexpr(1), tl.constexpr(2)


def packing(scales: torch.Tensor | None, kept: torch.Tensor, dtype: torch.dtype) -> int | None:
    """How a kernel makes two numbers of fp16 of two stored codes at a time; None where it takes them one by one.

    Converted one by one to bf16, codes cost more time than reading them does. In fp16 all codes are exact. The
    instructions that do it are unknown to Triton's interpreter.
    """
    dim = kept.shape[-1]
    if scales is None or dtype == torch.float32 or dim % 2 or dim < 32:
        return None
    return (BY_ARITHMETIC if interpreted() else BY_BITS).value


def kv_dtype_of(scales: torch.Tensor | None, kept: torch.Tensor):
    """The dtype of stored codes, as kernels take it; None for a store that rounds nothing."""
    return None if scales is None else TRITON_DTYPES[kept.dtype]


@triton.jit
def halves(codes, KV_DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """Codes as fp16. int8 in 1.25 instructions an element: the bits of 1024 + 128 + code, less 1152."""
    if PACKED == BY_ARITHMETIC or KV_DTYPE != tl.int8:
        return codes.to(tl.float16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 codes, ones, less;
        mov.b32 ones, 0x64646464;
        mov.b32 less, 0x64806480;
        xor.b32 codes, $2, 0x80808080;
        prmt.b32 $0, codes, ones, 0x4140;
        prmt.b32 $1, codes, ones, 0x4342;
        sub.f16x2 $0, $0, less;
        sub.f16x2 $1, $1, less;
        }""",
        "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def low_and_high(pairs, KV_DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """int16s of two codes each as two tensors of fp16, those of the low bytes and those of the high ones."""
    if PACKED == BY_ARITHMETIC:
        if KV_DTYPE == tl.int8:
            return ((pairs << 8) >> 8).to(tl.float16), (pairs >> 8).to(tl.float16)
        low, high = (pairs & 255).to(tl.uint8), ((pairs >> 8) & 255).to(tl.uint8)
        return low.to(KV_DTYPE, bitcast=True).to(tl.float16), high.to(KV_DTYPE, bitcast=True).to(tl.float16)
    if KV_DTYPE == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 codes, ones, less;
            mov.b32 ones, 0x64646464;
            mov.b32 less, 0x64806480;
            xor.b32 codes, $2, 0x80808080;
            prmt.b32 $0, codes, ones, 0x4240;
            prmt.b32 $1, codes, ones, 0x4341;
            sub.f16x2 $0, $0, less;
            sub.f16x2 $1, $1, less;
            }""",
            "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 one, other;
        .reg .b32 two, more;
        mov.b32 {one, other}, $2;
        cvt.rn.f16x2.e4m3x2 two, one;
        cvt.rn.f16x2.e4m3x2 more, other;
        prmt.b32 $0, two, more, 0x5410;
        prmt.b32 $1, two, more, 0x7632;
        }""",
        "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def power_below(x):
    """The greatest power of two up to x, of every positive number; 1 of zero."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0.0, 1.0, power)


@triton.jit
def fitted(query):
    """Queries by a power of two into the range of fp16, where what a bf16 holds is exact, and that of each row."""
    unit = power_below(tl.max(tl.abs(query.to(tl.float32)), axis=1))
    return (query.to(tl.float32) / unit[:, None]).to(tl.float16), unit


@triton.jit
def rounded(x, KV_DTYPE: tl.constexpr):
    """Codes of x, (rows, D) in fp32, and the scale of every row, bit for bit as `kv_quantization` has them."""
    TOP: tl.constexpr = INT8_TOP if KV_DTYPE == tl.int8 else FLOAT8_TOP
    size = tl.abs(x)
    top, total = tl.max(size, axis=1), tl.sum(size, axis=1)
    top = tl.where(total == total, top, total)  # a maximum may leave NaN out
    small = top < AT_LEAST
    # `/` is an approximation on a GPU, and what lies in the middle of two codes would fall either way.
    scale = tl.where(small, 0.0, tl.div_rn(top, TOP))
    codes = x * tl.where(small, 0.0, tl.div_rn(TOP, tl.where(small, 1.0, top)))[:, None]
    if KV_DTYPE == tl.int8:
        below = tl.floor(codes)  # half is added to this, as a compiler adds to a product without rounding it
        codes = tl.where(codes >= below + 0.5, below + 1.0, below)
    else:
        codes = nearest_float8(codes)
    return codes.to(KV_DTYPE), scale
