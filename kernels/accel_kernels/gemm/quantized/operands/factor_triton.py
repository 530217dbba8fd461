"""Numbers of 4 bits side by side, as one factor of a product of many rows."""

import triton
import triton.language as tl

from accel_kernels.gemm.quantized.operands.unpacking_triton import by_place, planes, side_by_side, wide_scale

E2M1_PAIRS = tl.constexpr(by_place("mxfp4", "bf16", True))


@triton.jit
def as_operand(w, UNPACK_MODE: tl.constexpr):
    """The same pairs of 16 bits: Triton 3.6 has no layout for a factor that it has followed to a tensor of more
    dimensions.
    """
    if UNPACK_MODE == "plain" or w.dtype == tl.float32:
        return w
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=True, pack=2)


@triton.jit
def scaled_e2m1(words, scales, DTYPE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """Words (N, B) of MXFP4 and their scales, exponents in uint8, as numbers (N, 8 B) in DTYPE, rounded once."""
    if DTYPE == tl.bfloat16 and UNPACK_MODE != "plain":
        factors = tl.maximum(scales.to(tl.int32) << 7, 0x40)  # 2^-127 is half of the least that has all bits
        return side_by_side(
            tl.inline_asm_elementwise(
                E2M1_PAIRS, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, factors << 16 | factors],
                dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
            )
        )  # fmt: skip
    else:
        wide, scale = planes(words, 65536, "mxfp4", UNPACK_MODE), wide_scale(scales)
        f = ()
        for place in tl.static_range(8):
            f = f + ((wide[place] * scale).to(DTYPE),)
        return side_by_side(f)
