"""Stored codes of 8 bits as operands of tensor core products (mma.m16n8k16), register by register.

A tensor here is one register of every thread, (warps, 32). Lane 4 g + t of a warp holds rows or columns g. Along the
contraction it holds 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Their order is free, as long as both operands have the same. So
a thread keeps the 16 bytes that one load gives it, and no code moves to another thread:

* scores = Q K^T: thread (g, t) loads channels 16 t to 16 t + 15 of each 64 of token g. Its word s, four channels, is
  its part of step s. Q is loaded alike.
* out^T = V^T P^T: thread (g, t) loads D / 8 channels of four tokens. Bytes of two tokens are put side by side; a
  word, four channels, gives rows g and g + 8 of two products. P stays where the scores leave it: the accumulators of
  one product (row g, columns 2 t and 2 t + 1) lie as the second operand of the next.

Scores of a warp's 16 tokens come from two products of 8. Column n of the first is token 4 (n // 2) + n % 2, of the
second the token two later. So thread (g, t) has head g of tokens 4 t to 4 t + 3, whose scales are one load.

NVIDIA, "Parallel Thread Execution ISA", warp-level matrix fragments; the conversion as in `rounding.halves`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


@gluon.constexpr_function
def _converted(word: str, low: str, high: str, integers: bool) -> str:
    """PTX: the codes of a word as fp16, the first two in `low`."""
    if not integers:
        return f"""mov.b32 {{one, other}}, {word};
            cvt.rn.f16x2.e4m3x2 {low}, one;
            cvt.rn.f16x2.e4m3x2 {high}, other;"""
    return f"""xor.b32 bits, {word}, 0x80808080;
            prmt.b32 {low}, bits, ones, 0x4140;
            prmt.b32 {high}, bits, ones, 0x4342;
            sub.f16x2 {low}, {low}, less;
            sub.f16x2 {high}, {high}, less;"""


BEGIN = """{
            .reg .b16 one, other;
            .reg .b32 none, bits, ones, less, pair;
            .reg .f32 x, y;
            mov.b32 none, 0;
            mov.b32 ones, 0x64646464;
            mov.b32 less, 0x64806480;
"""


@gluon.constexpr_function
def _scores_ptx(words, integers):
    """$0, $1: scores; then words of keys, then two registers of queries a word. Rows g + 8 are zeros."""
    lines = [BEGIN, ".reg .b32 low, high;", "mov.f32 $0, 0.0; mov.f32 $1, 0.0; mov.f32 x, 0.0; mov.f32 y, 0.0;"]
    for s in range(words):
        q = 2 + words + 2 * s
        lines.append(_converted(f"${2 + s}", "low", "high", integers))
        lines.append(f"{MMA} {{$0, $1, x, y}}, {{${q}, none, ${q + 1}, none}}, {{low, high}}, {{$0, $1, x, y}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _values_ptx(integers):
    """$0 to $7: two accumulators; $8 to $11: a word of four tokens each; $12, $13: weights; $14 to $21: as $0 to $7."""
    lines = [BEGIN, ".reg .b32 a<4>;"]
    for product, bytes_of in enumerate(("0x5140", "0x7362")):
        for i in range(2):
            lines.append(f"prmt.b32 pair, ${8 + 2 * i}, ${9 + 2 * i}, {bytes_of};")
            lines.append(_converted("pair", f"a{2 * i}", f"a{2 * i + 1}", integers))
        into, summed = (", ".join(f"${first + 4 * product + j}" for j in range(4)) for first in (0, 14))
        lines.append(f"{MMA} {{{into}}}, {{a0, a1, a2, a3}}, {{$12, $13}}, {{{summed}}};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _load_ptx(words, far, count):
    """words registers, four or two at a time, `far` bytes apart, from row * stride + base."""
    lines = ["{ .reg .b64 a;", f"mad.wide.s32 a, ${words}, ${words + 1}, ${words + 2};"]
    for first in range(0, words, count):
        into = ", ".join(f"${first + j}" for j in range(count))
        lines.append(f"ld.global.L1::no_allocate.v{count}.b32 {{{into}}}, [a + {first // count * far}];")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _constraints(outputs, inputs):
    """ "=&f4" is four of "=&f"."""
    return ",".join(one for part in (outputs + " " + inputs).split() for one in _repeated(part))


@gluon.constexpr_function
def _repeated(part: str) -> list[str]:
    kind = part.rstrip("0123456789")
    return [kind] * int(part[len(kind) :] or 1)


@gluon.jit
def load_words(row, stride, base, WORDS: gl.constexpr, FAR: gl.constexpr, COUNT: gl.constexpr):
    """A tuple of words from the addresses row * stride + base, COUNT at a time, FAR bytes apart."""
    return gl.inline_asm_elementwise(
        _load_ptx(WORDS, FAR, COUNT), _constraints(f"=r{WORDS}", "r r l"), [row, stride, base],
        dtype=(gl.int32,) * WORDS, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_four(address):
    """Four fp32 next to each other."""
    return gl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [address], dtype=(gl.float32,) * 4,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_word(address):
    return gl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def key_scores(words, queries, WORDS: gl.constexpr, INTEGERS: gl.constexpr):
    """Scores of head g and two tokens, from the words of one product's keys and the registers of all queries."""
    return gl.inline_asm_elementwise(
        _scores_ptx(WORDS, INTEGERS), _constraints("=&f2", f"r{3 * WORDS}"), words + queries,
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def add_values(a, b, c, d, low, high, acc, INTEGERS: gl.constexpr):
    """acc, eight registers, plus a word of tokens 4 t, .. 4 t + 3 each times their weights, two to a register."""
    return gl.inline_asm_elementwise(
        _values_ptx(INTEGERS), _constraints("=&f8", "r6 f8"), (a, b, c, d, low, high) + acc,
        dtype=(gl.float32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def two_halves(low, high):
    """Two fp32 as fp16 in a register."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def of_lane(x, lane):
    """x of another lane of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def quad_max(x):
    """The maximum over t; NaN may be left out."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 other;
            shfl.sync.bfly.b32 other, $1, 1, 0x1f, 0xffffffff;
            max.f32 $0, $1, other;
            shfl.sync.bfly.b32 other, $0, 2, 0x1f, 0xffffffff;
            max.f32 $0, $0, other;
        }""",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2_and_inverse(x):
    """Of x, at least 2^-100; NaN stays."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 some;
            max.NaN.f32 some, $2, 0f0D800000;
            lg2.approx.ftz.f32 $0, some;
            rcp.approx.ftz.f32 $1, some;
        }""",
        "=&f,=&f,f", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def registers(x, LANES: gl.constexpr):
    """The columns of x, (32, a power of two), each as a register, (1, 32)."""
    columns: gl.constexpr = x.shape[1]
    if columns == 1:
        return (gl.expand_dims(gl.convert_layout(gl.reshape(x, [32]), gl.SliceLayout(0, LANES)), 0),)
    else:
        low, high = gl.split(gl.permute(gl.reshape(x, [32, 2, columns // 2]), (0, 2, 1)))
        return registers(low, LANES) + registers(high, LANES)


@gluon.jit
def joined(parts):
    """(warps, 32, n) of n registers."""
    n: gl.constexpr = len(parts)
    if n == 1:
        x = parts[0]
        return gl.reshape(x, [x.shape[0], 32, 1])
    else:
        x = _halved(parts)
        return gl.reshape(x, [x.shape[0], 32, n])


@gluon.jit
def _halved(parts):
    n: gl.constexpr = len(parts)
    if n == 1:
        return parts[0]
    else:
        pairs = ()
        for i in gl.static_range(n // 2):
            pairs = pairs + (gl.join(parts[i], parts[i + n // 2]),)
        return _halved(pairs)
