"""Numbers of fewer bits out of 32-bit words in pairs of 16-bit ones that share a register (see `fragments`).

Bits are put where a float of a known exponent keeps its fraction (see `unpacking`). What shares a register are numbers
16 bits apart in the word, or neighbours where that takes no more instructions.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _scaled(pairs: int, kind: str, one: str, operands: tuple[str, str]) -> str:
    """Instructions that add the second operand to registers p0, p1 ... and multiply by the first; either may be ""."""
    scale, added = operands
    lines = []
    for pair in range(pairs):
        if added:
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, {one}, {added};")
        if scale:
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, {scale}, nothing;")
    return "\n".join(lines)


def _program(body: str, pairs: int, kind: str, scaled: bool, zeros: bool) -> str:
    one = "0x3f803f80" if kind == "bf16x2" else "0x3c003c00"
    scale, added = f"${2 * pairs + 1}" if scaled else "", f"${2 * pairs + 2}" if zeros else ""
    registers = ", ".join(f"p{pair}" for pair in range(pairs))
    out = "\n".join(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p{pair};" for pair in range(pairs))
    return "\n".join(
        ("{", f".reg .b32 {registers}, one, nothing;", f"mov.b32 one, {one};", "mov.b32 nothing, 0x80008000;", body,
         _scaled(pairs, kind, "one", (scale, added)), out, "}")
    )  # fmt: skip


# Pairs of places 0 and 4, 1 and 5 ...: 128 + 8 + n, or 1024 + 8 + n.
_INT4 = """.reg .b32 w1, w2, w3;
shr.u32 w1, $8, 4;
shr.u32 w2, $8, 8;
shr.u32 w3, $8, 12;
lop3.b32 p0, $8, 0x000f000f, BASE, 0xea;
lop3.b32 p1, w1, 0x000f000f, BASE, 0xea;
lop3.b32 p2, w2, 0x000f000f, BASE, 0xea;
lop3.b32 p3, w3, 0x000f000f, BASE, 0xea;"""

# Pairs of bytes 0 and 2, 1 and 3: (7 bits + 128.0) - (the sign's bit + 128.0).
_INT8_BF16 = """.reg .b32 w, q0, q1, less;
mov.b32 less, 0xbf80bf80;
shr.u32 w, $4, 8;
lop3.b32 p0, $4, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q0, $4, 0x00800080, 0x43004300, 0xea;
lop3.b32 p1, w, 0x007f007f, 0x43004300, 0xea;
lop3.b32 q1, w, 0x00800080, 0x43004300, 0xea;
fma.rn.bf16x2 p0, q0, less, p0;
fma.rn.bf16x2 p1, q1, less, p1;"""

# Neighbours: 1024 + 128 + n.
_INT8_FP16 = """.reg .b32 u, middle;
mov.b32 middle, 0x64806480;
xor.b32 u, $4, 0x80808080;
prmt.b32 p0, u, 0x64646464, 0x4140;
prmt.b32 p1, u, 0x64646464, 0x4342;
sub.rn.f16x2 p0, p0, middle;
sub.rn.f16x2 p1, p1, middle;"""

_FP8_FP16 = """.reg .b16 a, b;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 p0, a;
cvt.rn.f16x2.e4m3x2 p1, b;"""

_FP8_BF16 = """.reg .b16 a, b, c, d;
.reg .b32 h0, h1;
.reg .f32 f0, f1, f2, f3;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 h0, a;
cvt.rn.f16x2.e4m3x2 h1, b;
mov.b32 {a, b}, h0;
mov.b32 {c, d}, h1;
cvt.f32.f16 f0, a;
cvt.f32.f16 f1, b;
cvt.f32.f16 f2, c;
cvt.f32.f16 f3, d;
cvt.rn.bf16x2.f32 p0, f1, f0;
cvt.rn.bf16x2.f32 p1, f3, f2;"""

_BODIES = {
    ("int4", "bf16"): _INT4.replace("BASE", "0x43004300"),
    ("int4", "fp16"): _INT4.replace("BASE", "0x64006400"),
    ("int8", "bf16"): _INT8_BF16,
    ("int8", "fp16"): _INT8_FP16,
    ("fp8", "bf16"): _FP8_BF16,
    ("fp8", "fp16"): _FP8_FP16,
}


@constexpr_function
def _program(format, dtype, scaled, zeros, raw):
    """PTX: the words' operand comes after the results, then scale and zero, where there are any; p0, p1 ... a pair."""
    pairs = 4 if format == "int4" else 2
    kind, one = ("bf16x2", "0x3f803f80") if dtype == "bf16" else ("f16x2", "0x3c003c00")
    lines = [f".reg .b32 {', '.join(f'p{pair}' for pair in range(pairs))}, one, nothing;", f"mov.b32 one, {one};",
             "mov.b32 nothing, 0x80008000;", _BODIES[format, dtype]]  # fmt: skip
    for pair in range(pairs):
        if zeros or (format == "int4" and not raw):
            added = f"${2 * pairs + 2}" if zeros else "0xc308c308" if dtype == "bf16" else "0xe408e408"
            if not zeros:
                lines.append(f".reg .b32 middle{pair};\nmov.b32 middle{pair}, {added};")
                added = f"middle{pair}"
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, one, {added};")
        if scaled:
            lines.append(f"fma.rn.{kind} p{pair}, p{pair}, ${2 * pairs + 1}, nothing;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p{pair};")
    return "{" + "\n".join(lines) + "}"


@constexpr_function
def _operands(results, words):
    return ",".join(["=h"] * results + ["r"] * words)


@gluon.jit
def pairs(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr,
          RAW: gl.constexpr):  # fmt: skip
    """Words of int32 as a tuple of the bits of bf16 or fp16, DTYPE, in int16: two and two what shares a register.

    Every one is (number + zero) * scale, rounded once, or the number itself where not SCALED. scales: int32 like the
    words, the scale's bits twice. zeros: likewise, what is to be added, less `middle` for 4 bits. RAW: 4-bit numbers
    with `middle` still in them.
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
    if FORMAT == "int4":
        return gl.inline_asm_elementwise(
            PROGRAM, _operands(8, len(given)), given, dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            PROGRAM, _operands(4, len(given)), given, dtype=(gl.int16,) * 4, is_pure=True, pack=1
        )


@constexpr_function
def middle(format, dtype):
    """What `pairs` gives RAW beyond the numbers."""
    return 0 if format != "int4" else 136 if dtype == gl.bfloat16 else 1032
