"""Numbers of blocks out of their words, two to a register, by PTX: see `units_triton`.

Bits are put where a float of a known exponent keeps its fraction, see `unpacking_triton` of `quantized.operands`.
Places in a table are looked up two at a time: shared memory has all 256 pairs, 32 times, so that each thread of a warp
has its own bank. It is declared in PTX, since this language gives no addresses of its own shared memory.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.quantized.operands.mma_operands_triton import places

ADDRESS = gl.constexpr("{\n.shared .align 128 .b8 pairs[32768];\nmov.u32 $0, pairs;\n}")
PUT = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, $1;")
AFTER_ALL = gl.constexpr("bar.sync 0;\nmov.b32 $0, $1;")


@constexpr_function
def program(source, bf16, scaled, shift=0, upper=False):
    """PTX that makes numbers of a word, $1 two of them in turns, and what it takes besides the word.

    Then come: of "table" the thread's bank and the table; of "sixes" the word of the upper bits, which `shift` and
    `upper` are about; where scaled the scale of each part, of "runs" after it what is added to numbers times it.
    """
    kind, base = ("bf16x2", "0x43434343") if bf16 else ("f16x2", "0x64646464")
    count = {"table": 4, "runs": 4, "halves": 4, "bytes": 2, "sixes": 2}[source]
    word, lines = 2 * count, [f".reg .b32 p<{count}>, q<2>, l, h, w<4>, one, less;\n.reg .f32 f, g;"]
    parts = [0] * count
    if source == "table":
        for byte in range(4):
            lines.append(f"{'shl' if byte == 0 else 'shr'}.b32 l, ${word}, {abs(8 * byte - 7)};")
            lines.append(f"lop3.b32 l, l, 0x7f80, ${word + 1}, 0xea;\nadd.u32 l, l, ${word + 2};")
            lines.append(f"ld.shared.b32 p{byte}, [l];")
        scales = word + 3
    elif source in (
        "runs",
        "halves",
    ):  # nibbles 0 and 4, 1 and 5 ...; the bit above them is bit `shift` of a byte, or the next
        for at in range(4):
            lines.append(f"shr.u32 w{at}, ${word}, {4 * at};")
            lines.append(f"lop3.b32 p{at}, w{at}, 0x000f000f, {'0x43004300' if bf16 else '0x64006400'}, 0xea;")
            if upper:
                away = shift + at % 2 + at // 2 * 8 - 4
                lines.append(f"{'shr' if away > 0 else 'shl'}.b32 h, ${word + 1}, {abs(away)};")
                lines.append(f"lop3.b32 p{at}, h, 0x00100010, p{at}, 0xea;")
        scales, parts = word + 1 + upper, [0, 1, 0, 1]
        if source == "halves":  # less 8
            lines.append(f"mov.b32 one, {'0x3f803f80' if bf16 else '0x3c003c00'};")
            lines.append(f"mov.b32 less, {'0xc308c308' if bf16 else '0xe408e408'};")
            lines.extend(f"fma.rn.{kind} p{at}, p{at}, one, less;" for at in range(4))
            parts = [0] * 4
    elif source == "bytes" and bf16:  # bytes 0 and 2, 1 and 3: (7 bits + 128.0) - (the sign's bit + 128.0)
        lines.append(f"mov.b32 less, 0xbf80bf80;\nmov.b32 w0, ${word};\nshr.u32 w1, ${word}, 8;")
        for at in range(2):
            lines.append(f"lop3.b32 p{at}, w{at}, 0x007f007f, 0x43004300, 0xea;")
            lines.append(f"lop3.b32 q{at}, w{at}, 0x00800080, 0x43004300, 0xea;")
            lines.append(f"fma.rn.bf16x2 p{at}, q{at}, less, p{at};")
        scales = word + 1
    elif source == "bytes":  # 1024 + 128 + n
        lines.append(f"mov.b32 less, 0x64806480;\nxor.b32 l, ${word}, 0x80808080;")
        for at, order in enumerate(("0x4240", "0x4341")):
            lines.append(f"prmt.b32 p{at}, l, 0x64646464, {order};")
            lines.append(f"sub.rn.f16x2 p{at}, p{at}, less;")
        scales = word + 1
    else:
        lines.append(f"mov.b32 one, {'0x3f803f80' if bf16 else '0x3c003c00'};")
        lines.append(f"mov.b32 less, {'0xc320c320' if bf16 else '0xe420e420'};")
        lines.append(f"shr.u32 l, ${word}, {4 * upper};\nand.b32 l, l, 0x0f0f0f0f;")
        lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 h, ${word + 1}, {abs(shift)};")
        lines.append("lop3.b32 l, h, 0x30303030, l, 0xea;")
        for at, order in enumerate(("0x4140", "0x4342")):
            lines.append(f"prmt.b32 p{at}, l, {base}, {order};\nfma.rn.{kind} p{at}, p{at}, one, less;")
        scales = word + 2
    for at in range(count):
        if scaled:
            scale = scales + parts[at] * (2 if source == "runs" else 1)
            if bf16:
                lines.append(f"shl.b32 l, p{at}, 16;\nand.b32 h, p{at}, 0xffff0000;\nmov.b32 f, l;\nmov.b32 g, h;")
            else:
                lines.append(f"{{\n.reg .b16 a, b;\nmov.b32 {{a, b}}, p{at};\ncvt.f32.f16 f, a;\ncvt.f32.f16 g, b;\n}}")
            op, by = ("fma.rn", f"${scale}, ${scale + 1}") if source == "runs" else ("mul", f"${scale}")
            lines.extend(f"{op}.f32 {one}, {one}, {by};" for one in "fg")
            lines.append(f"cvt.rn.{kind}.f32 p{at}, g, f;")
        lines.append(f"mov.b32 {{${2 * at}, ${2 * at + 1}}}, p{at};")
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def operands(results, words, floats):
    """Constraints of a program's operands."""
    return ",".join(["=h"] * results + ["r"] * words + ["f"] * floats)


@gluon.jit
def pair_table(code_ptr, DTYPE: gl.constexpr, num_warps: gl.constexpr):
    """Writes the table, and gives its address. The first of two numbers is in a byte's upper half."""
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [num_warps, 1, 1], [2, 1, 0])
    upper, lower, bank = places(16, 16, 32, L)
    first = gl.load(code_ptr + upper).to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    second = gl.load(code_ptr + lower).to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) << 16
    start = gl.inline_asm_elementwise(ADDRESS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    place = start + bank * 4 + upper * 2048 + lower * 128
    gl.inline_asm_elementwise(
        PUT, "=r,r,r", [place, (first | second) + bank * 0], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.inline_asm_elementwise(AFTER_ALL, "=r,r", [start], dtype=gl.int32, is_pure=False, pack=1)
