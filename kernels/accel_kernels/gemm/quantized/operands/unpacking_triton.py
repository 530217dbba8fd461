"""Numbers of fewer bits out of 32-bit words, inside kernels: fp32 planes, factors of a product, or pairs of 16 bits.

The GPU converts integers at a quarter of the rate at which it adds, and 4-bit numbers cost a shift and a mask each
before that. So bits are put where a float of a known exponent keeps its fraction: 0x4300 with n in its lowest bits is,
as a bfloat16, 128 + n, and one three-input logic operation makes two of them (Kim et al. 2022, "Who Says Elephants
Can't Run"). What was added is taken off again, of the numbers or of their sum. FORMAT: "int8", "int4", "fp8" or
"mxfp4", a word holding four numbers or eight, the first in the lowest bits. Numbers of MXFP4 are float16's with another
bias: they come as 2^-14 of what they are, and `wide_scale` is as much larger. UNPACK_MODE: "plain", arithmetic in place
of PTX, for the interpreter; "exact"; or "rough", which spends a thousandth of a sum's rounding in bfloat16 on fewer
instructions.

Pairs share a register (see `mma_operands_triton`): numbers 16 bits apart in the word, or neighbors where that takes no
more instructions.
"""

import re

import torch
import triton
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.device import interpreted
from accel_kernels.gemm.quantized_weight import FORMATS

BITS = {name: format.bits for name, format in FORMATS.items()}  # Triton compares what kernels read at every launch

# Places 0 and 4, 1 and 5 ... of a word in p0, p1 ...: BASE + 8 + n; the word is $8.
_NIBBLES = """.reg .b32 w1, w2, w3;
shr.u32 w1, $8, 4;
shr.u32 w2, $8, 8;
shr.u32 w3, $8, 12;
lop3.b32 p0, $8, 0x000f000f, BASE, 0xea;
lop3.b32 p1, w1, 0x000f000f, BASE, 0xea;
lop3.b32 p2, w2, 0x000f000f, BASE, 0xea;
lop3.b32 p3, w3, 0x000f000f, BASE, 0xea;"""

# Bytes 0 and 2, 1 and 3: (7 bits + 128.0) - (the sign's bit + 128.0).
_INT8_BF16 = """.reg .b32 w, q0, q1, less;
mov.b32 less, 0xbf80bf80;
shr.u32 w, $4, 8;
lop3.b32 p0, $4, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q0, $4, 0x00800080, 0x43004300, 0xea;
lop3.b32 p1, w, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q1, w, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 p0, q0, less, p0;
fma.rn.bf16x2 p1, q1, less, p1;"""

# Neighbors, in ten bits of fraction: 1024 + 128 + n.
_INT8_FP16 = """.reg .b32 u, middle;
mov.b32 middle, 0x64806480;
xor.b32 u, $4, 0x80808080;
prmt.b32 p0, u, 0x64646464, 0x4140;
prmt.b32 p1, u, 0x64646464, 0x4342;
sub.rn.f16x2 p0, p0, middle;
sub.rn.f16x2 p1, p1, middle;"""

# Neighbors.
_FP8_FP16 = """.reg .b16 a, b;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 p0, a;
cvt.rn.f16x2.e4m3x2 p1, b;"""

# The floats of p0 and p1 in f0 to f3.
_WIDENED = """.reg .b16 c, d, e, f;
mov.b32 {c, d}, p0;
mov.b32 {e, f}, p1;
cvt.f32.f16 f0, c;
cvt.f32.f16 f1, d;
cvt.f32.f16 f2, e;
cvt.f32.f16 f3, f;"""

_FP8_BF16 = f""".reg .f32 f0, f1, f2, f3;
{_FP8_FP16}
{_WIDENED}
cvt.rn.bf16x2.f32 p0, f1, f0;
cvt.rn.bf16x2.f32 p1, f3, f2;"""

# Bits of 2^-126 of a number, times 2^126. A nibble times 0x1040 stands in bits 6 to 9 and again in 12 to 15: its three
# lower bits are wanted of the one, its sign of the other.
_E2M1 = """.reg .b32 high, large;
mov.b32 large, 0x7e807e80;
shr.u32 high, $8, 8;
""" + "\n".join(
    f"and.b32 p{at}, {'$8' if at < 2 else 'high'}, {mask};\nmul.lo.u32 p{at}, p{at}, {by};\n"
    f"and.b32 p{at}, p{at}, 0x81c081c0;\nfma.rn.bf16x2 p{at}, p{at}, large, nothing;"
    for at, (mask, by) in enumerate((("0x000f000f", "0x1040"), ("0x00f000f0", "0x104")) * 2)
)

_BODIES = {
    ("mxfp4", "bf16"): _E2M1,
    ("int4", "bf16"): _NIBBLES.replace("BASE", "0x43004300"),
    ("int4", "fp16"): _NIBBLES.replace("BASE", "0x64006400"),
    ("int8", "bf16"): _INT8_BF16,
    ("int8", "fp16"): _INT8_FP16,
    ("fp8", "bf16"): _FP8_BF16,
    ("fp8", "fp16"): _FP8_FP16,
}


@constexpr_function
def _text(format: str, dtype: str, scaled: bool, zeros: bool, raw: bool, results: tuple[str, ...]) -> str:
    """PTX that leaves a pair in each of `results`. The words' operand comes after them, then scale and zero, if any."""
    pairs = len(results)
    kind, one = ("bf16x2", "0x3f803f80") if dtype == "bf16" else ("f16x2", "0x3c003c00")
    lines = [f".reg .b32 {', '.join(f'p{pair}' for pair in range(pairs))}, one, nothing;", f"mov.b32 one, {one};",
             "mov.b32 nothing, 0x80008000;", _BODIES[format, dtype]]  # fmt: skip
    for pair, result in enumerate(results):
        if zeros or (format == "int4" and not raw):
            added = f"${2 * pairs + 2}" if zeros else "0xc308c308" if dtype == "bf16" else "0xe408e408"
            if not zeros:
                lines.append(f".reg .b32 middle{pair};\nmov.b32 middle{pair}, {added};")
                added = f"middle{pair}"
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, one, {added};")
        if scaled:
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, ${2 * pairs + 1}, nothing;")
        lines.append(f"mov.b32 {{{result}}}, p{pair};")
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def by_place(format, dtype, scaled=False):
    """The numbers themselves, or scaled, $0 the first of the word."""
    apart = {"int4": 4, "mxfp4": 4, "int8": 2 if dtype == "bf16" else 1}[format]
    firsts = range(4) if apart == 4 else range(2) if apart == 2 else (0, 2)
    return _text(format, dtype, scaled, False, False, tuple(f"${at}, ${at + apart}" for at in firsts))


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

# 128 + n in the upper half of a word is that in fp32 too. What stays in the lower half adds 0x4300 / 2^16 and at most
# n / 2^16 more. $9 is 2^16, unknown to the compiler: shifts and masks wait for one another, multiplications run beside.
INT4_PLANES = tl.constexpr(
    "{\n.reg .b32 p0, p1, p2, p3;\n"
    + _BODIES["int4", "bf16"]
    + "".join(f"\nmul.lo.u32 ${at}, p{at}, $9;\nmov.b32 ${4 + at}, p{at};" for at in range(4))
    + "\n}"
)

# Signs and the rest of two numbers, 16 bits apart, go to their places in a pair of float16.
E2M1_PLANES = tl.constexpr(
    "{\n.reg .b32 s, t;\n.reg .b16 l, h;\n"
    + "".join(
        f"shl.b32 s, $8, {12 - 4 * at};\n{'shl' if at < 3 else 'shr'}.b32 t, $8, {(9, 5, 1, 3)[at]};\n"
        f"and.b32 t, t, 0x0e000e00;\nlop3.b32 t, s, 0x80008000, t, 0xea;\nmov.b32 {{l, h}}, t;\n"
        f"cvt.f32.f16 ${at}, l;\ncvt.f32.f16 ${at + 4}, h;\n"
        for at in range(4)
    )
    + "}"
)

FP8_PLANES = tl.constexpr("{\n.reg .b32 p0, p1;\n" + _FP8_FP16 + "\n" + re.sub(r"\bf(\d),", r"$\1,", _WIDENED) + "\n}")


@constexpr_function
def per_word(format):
    """Numbers of a format in a word of 32 bits."""
    return 32 // BITS[format]


SUBNORMAL = tl.constexpr(2.0**120)  # from the bits of float8 in a float32's upper half to its value


@triton.jit
def _plain(words, place: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT == "int8":
        return ((words << (24 - 8 * place)) >> 24).to(tl.float32)
    elif FORMAT == "int4":
        return ((words >> (4 * place)) & 15).to(tl.float32)
    elif FORMAT == "mxfp4":
        return e2m1(words, place)
    else:  # by its bits, also for cards that have no float8
        bits = words >> (8 * place)
        value = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * SUBNORMAL
        return tl.where((bits & 127) == 127, float("nan"), value)


@triton.jit
def e2m1(words, place: tl.constexpr):
    """Numbers of MXFP4 at one place of the words, float32."""
    bits = words >> (4 * place)
    return ((bits & 7) << 9 | (bits & 8) << 12).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def wide_scale(scale):
    """A scale in float32; of MXFP4, whose are exponents in uint8, that of `e2m1`."""
    if scale.dtype == tl.uint8:
        return ((scale.to(tl.int32) + 14) << 23).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def planes(words, two16, FORMAT: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """Words of int32 as a tuple of fp32 tensors of the same shape, one for each place: numbers plus `excess`.

    two16: 65536, from outside of the kernel.
    """
    if UNPACK_MODE == "plain":
        numbers = ()
        for place in tl.static_range(per_word(FORMAT)):
            numbers = numbers + (_plain(words, place, FORMAT),)
        return numbers
    elif FORMAT == "int4":
        return tl.inline_asm_elementwise(
            INT4_PLANES, "=f,=f,=f,=f,=f,=f,=f,=f,r,r", [words, two16], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    elif FORMAT == "mxfp4":
        return tl.inline_asm_elementwise(
            E2M1_PLANES, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1
        )
    elif FORMAT == "fp8":
        return tl.inline_asm_elementwise(
            FP8_PLANES, "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            INT8_ROUGH_PLANES if UNPACK_MODE == "rough" else INT8_PLANES,
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def numbers_by_place(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """Words of int32 as a tuple of tensors of the same shape in DTYPE, bf16 or fp16, exactly, one for each place."""
    if UNPACK_MODE == "plain" or FORMAT == "fp8" or FORMAT == "mxfp4":
        wide = planes(words, 65536, FORMAT, UNPACK_MODE)
        f = ()
        for place in tl.static_range(per_word(FORMAT)):
            f = f + ((wide[place] - excess(place, FORMAT, UNPACK_MODE)).to(DTYPE),)
        return f
    else:
        COUNT: tl.constexpr = per_word(FORMAT)
        BF16: tl.constexpr = DTYPE == tl.bfloat16
        PROGRAM: tl.constexpr = by_place(FORMAT, "bf16" if BF16 else "fp16")
        return tl.inline_asm_elementwise(
            PROGRAM, _operands(COUNT, 1), [words], dtype=((tl.bfloat16 if BF16 else tl.float16),) * COUNT, is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def side_by_side(f):
    """Eight tensors (.., B), of the places of words, as (.., 8 B)."""
    even = tl.join(tl.join(f[0], f[4]), tl.join(f[2], f[6]))  # the bits of a place, the highest joined first
    odd = tl.join(tl.join(f[1], f[5]), tl.join(f[3], f[7]))
    both = tl.join(even, odd)
    return both.reshape(f[0].shape[:-1] + [f[0].shape[-1] * 8])


@triton.jit
def factor(words, FORMAT: tl.constexpr, DTYPE: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """Words (S, N, B) of int32 as the numbers they hold, (S, N, B * PER_WORD) in DTYPE, bf16 or fp16, exactly."""
    f = numbers_by_place(words, FORMAT, DTYPE, UNPACK_MODE)
    if per_word(FORMAT) == 8:
        return side_by_side(f)
    else:
        return tl.join(tl.join(f[0], f[2]), tl.join(f[1], f[3])).reshape(
            words.shape[0], words.shape[1], words.shape[2] * 4
        )


@triton.jit
def excess(place: tl.constexpr, FORMAT: tl.constexpr, UNPACK_MODE: tl.constexpr):
    """What `planes` gives beyond the numbers, which 4-bit words hold plus 8."""
    if FORMAT == "int4":
        return 8.0 if UNPACK_MODE == "plain" else 136.0 if place < 4 else 136.26171875
    else:
        return 32896.0 if FORMAT == "int8" and UNPACK_MODE == "rough" else 0.0


def unpack_mode(dtype: torch.dtype) -> str:
    """How kernels unpack that multiply with an x of this dtype."""
    if interpreted():
        return "plain"
    return "rough" if dtype == torch.bfloat16 else "exact"


@constexpr_function
def _program(format, dtype, scaled, zeros, raw):
    results = tuple(f"${2 * pair}, ${2 * pair + 1}" for pair in range(32 // BITS[format] // 2))
    return _text(format, dtype, scaled, zeros, raw, results)


@constexpr_function
def _operands(results, words):
    return ",".join(["=h"] * results + ["r"] * words)


@gluon.jit
def pairs(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr,
          RAW: gl.constexpr):  # fmt: skip
    """Words of int32 as a tuple of the bits of bf16 or fp16, DTYPE, in int16: each two neighbors share a register.

    Every one is (number + zero) * scale, rounded once, or the number itself where not SCALED. scales: int32 like the
    words, the scale's bits twice. zeros: likewise, to be added; of 4 bits `zero_point` is taken off them before. RAW:
    `zero_point` is still in 4-bit numbers.
    """
    gl.static_assert(SCALED or not ZEROS)
    gl.static_assert(not (RAW and SCALED))
    NAME: gl.constexpr = "bf16" if DTYPE == gl.bfloat16 else "fp16"
    PROGRAM: gl.constexpr = _program(FORMAT, NAME, SCALED, ZEROS, RAW)
    given = (words,)
    if SCALED:
        given = given + (scales,)
    if ZEROS:
        given = given + (zeros,)
    COUNT: gl.constexpr = per_word(FORMAT)
    return gl.inline_asm_elementwise(
        PROGRAM, _operands(COUNT, len(given)), given, dtype=(gl.int16,) * COUNT, is_pure=True, pack=1
    )


@constexpr_function
def zero_point(format, dtype):
    """What `pairs` adds to the numbers where RAW: the 8 by which 4-bit numbers are stored, and its float's base."""
    return 0 if format != "int4" else 136 if dtype == gl.bfloat16 else 1032
