"""Numbers of fewer bits out of 32-bit words, inside kernels: as fp32 planes, or as 16-bit factors of a matrix product.

The GPU converts integers at a quarter of the rate at which it adds, and 4-bit numbers cost a shift and a mask each
before that. So bits are put where a float of a known exponent keeps its fraction: 0x4300 with n in its lowest bits is,
as a bfloat16, 128 + n, and one three-input logic operation makes two of them (Kim et al. 2022, "Who Says Elephants
Can't Run"). What was added is taken off again, of the numbers or of their sum. FORMAT: "int8", "int4" or "fp8", a word
holding four numbers or eight, the first in the lowest bits. MANNER: "plain", arithmetic in place of PTX, for the
interpreter; "exact"; or "rough", which spends a thousandth of a sum's rounding in bfloat16 on fewer instructions.
"""

import os

import torch
import triton
import triton.language as tl

# Four bytes above the fraction of 2^23, their signs turned: 2^23 + 128 + n.
INT8_PLANES = tl.constexpr("""{
.reg .b32 u;
.reg .f32 f;
xor.b32 u, $4, 0x80808080;
prmt.b32 $0, u, 0x4b000000, 0x7540;
prmt.b32 $1, u, 0x4b000000, 0x7541;
prmt.b32 $2, u, 0x4b000000, 0x7542;
prmt.b32 $3, u, 0x4b000000, 0x7543;
mov.f32 f, 0f4B000080;
sub.rn.f32 $0, $0, f;
sub.rn.f32 $1, $1, f;
sub.rn.f32 $2, $2, f;
sub.rn.f32 $3, $3, f;
}""")

# The same in the middle of the fraction of 2^15: 2^15 + 128 + n, left to be taken off the sum.
INT8_ROUGH_PLANES = tl.constexpr("""{
.reg .b32 u;
xor.b32 u, $4, 0x80808080;
prmt.b32 $0, u, 0x47000000, 0x7404;
prmt.b32 $1, u, 0x47000000, 0x7414;
prmt.b32 $2, u, 0x47000000, 0x7424;
prmt.b32 $3, u, 0x47000000, 0x7434;
}""")

# 128 + n in the upper half of a word is that in fp32 too; what stays in the lower half adds 0x4300 / 2^16 and at most
# n / 2^16 more. $9 is 2^16, unknown to the compiler: shifts and masks wait for one another, multiplications run beside.
INT4_PLANES = tl.constexpr("""{
.reg .b32 w1, w2, w3, p0, p1, p2, p3;
shr.u32 w1, $8, 4;
shr.u32 w2, $8, 8;
shr.u32 w3, $8, 12;
lop3.b32 p0, $8, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p1, w1, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p2, w2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p3, w3, 0x000f000f, 0x43004300, 0xea;
mul.lo.u32 $0, p0, $9;
mul.lo.u32 $1, p1, $9;
mul.lo.u32 $2, p2, $9;
mul.lo.u32 $3, p3, $9;
mov.b32 $4, p0;
mov.b32 $5, p1;
mov.b32 $6, p2;
mov.b32 $7, p3;
}""")

# (word & 7 bits | 128.0) - (word & the sign | 128.0), which is 128 or 256, two at a time: bytes 0 and 2, then 1 and 3.
INT8_BF16 = tl.constexpr("""{
.reg .b32 w, p, q, r, one;
mov.b32 one, 0xbf80bf80;
shr.u32 w, $4, 8;
lop3.b32 p, $4, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q, $4, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 r, q, one, p;
mov.b32 {$0, $2}, r;
lop3.b32 p, w, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q, w, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 r, q, one, p;
mov.b32 {$1, $3}, r;
}""")

# Ten bits of fraction: 1024 + 128 + n.
INT8_FP16 = tl.constexpr("""{
.reg .b32 u, p, q, middle;
mov.b32 middle, 0x64806480;
xor.b32 u, $4, 0x80808080;
prmt.b32 p, u, 0x64646464, 0x4140;
prmt.b32 q, u, 0x64646464, 0x4342;
sub.rn.f16x2 p, p, middle;
sub.rn.f16x2 q, q, middle;
mov.b32 {$0, $1}, p;
mov.b32 {$2, $3}, q;
}""")

# 128 + 8 + n; places 0 and 4 of a word are 16 bits apart, and so on.
INT4_BF16 = tl.constexpr("""{
.reg .b32 w1, w2, w3, p0, p1, p2, p3, one, middle;
mov.b32 one, 0x3f803f80;
mov.b32 middle, 0xc308c308;
shr.u32 w1, $8, 4;
shr.u32 w2, $8, 8;
shr.u32 w3, $8, 12;
lop3.b32 p0, $8, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p1, w1, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p2, w2, 0x000f000f, 0x43004300, 0xea;
lop3.b32 p3, w3, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 p0, p0, one, middle;
fma.rn.bf16x2 p1, p1, one, middle;
fma.rn.bf16x2 p2, p2, one, middle;
fma.rn.bf16x2 p3, p3, one, middle;
mov.b32 {$0, $4}, p0;
mov.b32 {$1, $5}, p1;
mov.b32 {$2, $6}, p2;
mov.b32 {$3, $7}, p3;
}""")

# The same in ten bits of fraction, 1024 + 8 + n.
INT4_FP16 = tl.constexpr(
    INT4_BF16.value.replace("43004300", "64006400")
    .replace("0x3f803f80", "0x3c003c00")
    .replace("0xc308c308", "0xe408e408")
    .replace("bf16x2", "f16x2")
)

FP8_PLANES = tl.constexpr("""{
.reg .b16 a, b, c, d;
.reg .b32 p, q;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 p, a;
cvt.rn.f16x2.e4m3x2 q, b;
mov.b32 {a, b}, p;
mov.b32 {c, d}, q;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}""")


@triton.jit
def _plain(words, place: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == "int8":
        return ((words << (24 - 8 * place)) >> 24).to(tl.float32)
    elif FORMAT == "int4":
        return ((words >> (4 * place)) & 15).to(tl.float32)
    else:
        return ((words >> (8 * place)) & 255).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def planes(words, two16, FORMAT: tl.constexpr, MANNER: tl.constexpr):
    """Words of int32 as a tuple of fp32 tensors of the same shape, one for each place: numbers plus `excess`.

    two16: 65536, from outside of the kernel.
    """
    if MANNER == "plain":
        numbers = ()
        for place in tl.static_range(8 if FORMAT == "int4" else 4):
            numbers = numbers + (_plain(words, place, FORMAT),)
        return numbers
    elif FORMAT == "int4":
        return tl.inline_asm_elementwise(
            INT4_PLANES, "=f,=f,=f,=f,=f,=f,=f,=f,r,r", [words, two16], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    elif FORMAT == "fp8":
        return tl.inline_asm_elementwise(
            FP8_PLANES, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            INT8_ROUGH_PLANES if MANNER == "rough" else INT8_PLANES,
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def factor(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr, MANNER: tl.constexpr):
    """Words (S, N, B) of int32 as the numbers they hold, (S, N, B * PER_WORD) in DTYPE, bf16 or fp16, exactly."""
    if MANNER == "plain" or FORMAT == "fp8":
        wide = planes(words, 65536, FORMAT, MANNER)
        f = ()
        for place in tl.static_range(8 if FORMAT == "int4" else 4):
            f = f + ((wide[place] - excess(place, FORMAT, MANNER)).to(DTYPE),)
    elif FORMAT == "int4" and DTYPE == tl.bfloat16:
        f = tl.inline_asm_elementwise(
            INT4_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1
        )
    elif FORMAT == "int4":
        f = tl.inline_asm_elementwise(
            INT4_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 8, is_pure=True, pack=1
        )
    elif DTYPE == tl.bfloat16:
        f = tl.inline_asm_elementwise(
            INT8_BF16, "=h,=h,=h,=h,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    else:
        f = tl.inline_asm_elementwise(
            INT8_FP16, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    if FORMAT == "int4":  # the bits of a place, the highest joined first
        even = tl.join(tl.join(f[0], f[4]), tl.join(f[2], f[6]))
        odd = tl.join(tl.join(f[1], f[5]), tl.join(f[3], f[7]))
        return tl.join(even, odd).reshape(words.shape[0], words.shape[1], words.shape[2] * 8)
    else:
        return tl.join(tl.join(f[0], f[2]), tl.join(f[1], f[3])).reshape(
            words.shape[0], words.shape[1], words.shape[2] * 4
        )


@triton.jit
def excess(place: tl.constexpr, FORMAT: tl.constexpr, MANNER: tl.constexpr):
    """What `planes` gives beyond the numbers, which 4-bit words hold plus 8."""
    if FORMAT == "int4":
        return 8.0 if MANNER == "plain" else 136.0 if place < 4 else 136.26171875
    else:
        return 32896.0 if FORMAT == "int8" and MANNER == "rough" else 0.0


def manner(dtype: torch.dtype) -> str:
    """How kernels unpack that multiply with an x of this dtype."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "plain"
    return "rough" if dtype == torch.bfloat16 else "exact"
