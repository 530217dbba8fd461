"""Blocks as factors of the tensor cores, from memory straight into registers: see `mma_operands_triton`.

A set is 512 columns of a row, two spans of four units. A unit is 64 columns, of which four threads read what they
multiply. Columns of a unit with one scale are one product, a part. SOURCE, a name of a format's own, says how:

- "table": places in a table of 16, two to a byte, one scale to a unit;
- "affine": 4-bit numbers in order, a scale and what is added to a unit, which lie in tensors of their own; of
  "affine-32" to half of one;
- "runs": 32 bytes of 4-bit numbers, the lower halves before the upper ones, with a scale and a minimum each;
- "bytes": two blocks of 32 bytes and a scale before them;
- "sixes": 4 bits and 2 bits of numbers with a scale to 16.

Places are looked up two at a time: shared memory has all 256 pairs, 32 times, so that each thread of a warp has its own
bank. It is declared in PTX, since this language gives no addresses of its own shared memory.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.quantized.operands.mma_operands_triton import places, unpacked, x_factor

UNIT, SPAN, SET = gl.constexpr(64), gl.constexpr(256), gl.constexpr(512)
SIGNS = gl.constexpr(0x88888888 - (1 << 32))  # of eight numbers: turned, these are 8 larger
ADDRESS = gl.constexpr("{\n.shared .align 128 .b8 pairs[32768];\nmov.u32 $0, pairs;\n}")
PUT = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, $1;")
AFTER_ALL = gl.constexpr("bar.sync 0;\nmov.b32 $0, $1;")


@constexpr_function
def unit_parts(source):
    """Products of a unit, each of as many columns."""
    return {"table": 1, "affine": 1, "affine-32": 2, "runs": 2, "bytes": 2, "sixes": 4}[source]


@constexpr_function
def is_affine(source):
    """Of either kind."""
    return source.startswith("affine")


@constexpr_function
def part_column(source, unit, part):
    """The first column of a unit's part in its span."""
    if source == "sixes":
        return unit // 2 * 128 + unit % 2 * 32 + part // 2 * 64 + part % 2 * 16
    return unit * 64 + part * 64 // unit_parts(source)


@constexpr_function
def _program(source, bf16, shift=0, upper=False):
    """PTX that makes numbers of a word, $1 two of them in turns, and what it takes besides the word.

    Then come: of "table" the thread's bank and the table, of "sixes" the word of the upper bits, which `shift` and
    `upper` are about.
    """
    kind, base = ("bf16x2", "0x43434343") if bf16 else ("f16x2", "0x64646464")
    count = {"table": 4, "runs": 4, "bytes": 2, "sixes": 2}[source]
    word, lines = 2 * count, [f".reg .b32 p<{count}>, q<2>, l, h, w<4>, one, less;"]
    if source == "table":
        for byte in range(4):
            lines.append(f"{'shl' if byte == 0 else 'shr'}.b32 l, ${word}, {abs(8 * byte - 7)};")
            lines.append(f"lop3.b32 l, l, 0x7f80, ${word + 1}, 0xea;\nadd.u32 l, l, ${word + 2};")
            lines.append(f"ld.shared.b32 p{byte}, [l];")
    elif source == "runs":  # nibbles 0 and 4, 1 and 5 ...
        for at in range(4):
            lines.append(f"shr.u32 w{at}, ${word}, {4 * at};")
            lines.append(f"lop3.b32 p{at}, w{at}, 0x000f000f, {'0x43004300' if bf16 else '0x64006400'}, 0xea;")
    elif source == "bytes" and bf16:  # bytes 0 and 2, 1 and 3: (7 bits + 128.0) - (the sign's bit + 128.0)
        lines.append(f"mov.b32 less, 0xbf80bf80;\nmov.b32 w0, ${word};\nshr.u32 w1, ${word}, 8;")
        for at in range(2):
            lines.append(f"lop3.b32 p{at}, w{at}, 0x007f007f, 0x43004300, 0xea;")
            lines.append(f"lop3.b32 q{at}, w{at}, 0x00800080, 0x43004300, 0xea;")
            lines.append(f"fma.rn.bf16x2 p{at}, q{at}, less, p{at};")
    elif source == "bytes":  # 1024 + 128 + n
        lines.append(f"mov.b32 less, 0x64806480;\nxor.b32 l, ${word}, 0x80808080;")
        for at, order in enumerate(("0x4240", "0x4341")):
            lines.append(f"prmt.b32 p{at}, l, 0x64646464, {order};")
            lines.append(f"sub.rn.f16x2 p{at}, p{at}, less;")
    else:
        lines.append(f"mov.b32 one, {'0x3f803f80' if bf16 else '0x3c003c00'};")
        lines.append(f"mov.b32 less, {'0xc320c320' if bf16 else '0xe420e420'};")
        lines.append(f"shr.u32 l, ${word}, {4 * upper};\nand.b32 l, l, 0x0f0f0f0f;")
        lines.append(f"{'shl' if shift > 0 else 'shr'}.b32 h, ${word + 1}, {abs(shift)};")
        lines.append("lop3.b32 l, h, 0x30303030, l, 0xea;")
        for at, order in enumerate(("0x4140", "0x4342")):
            lines.append(f"prmt.b32 p{at}, l, {base}, {order};\nfma.rn.{kind} p{at}, p{at}, one, less;")
    lines.extend(f"mov.b32 {{${2 * at}, ${2 * at + 1}}}, p{at};" for at in range(count))
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def _operands(results, words):
    return ",".join(["=h"] * results + ["r"] * words)


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


@gluon.jit
def _load(ptr, place, inside):
    return gl.load(ptr.to(gl.pointer_type(gl.int32)) + place, mask=inside, other=0, eviction_policy="evict_first")


@gluon.jit
def unit_words(ptr, row, span, word, inside, STEP: gl.constexpr, K: gl.constexpr, FORMAT: gl.constexpr,
               SOURCE: gl.constexpr):  # fmt: skip
    """What unit STEP of a set needs of half of the rows, tensors (S, H, 8). span: the first of the set. word: 0 to 7,
    two of each thread.
    """
    if SOURCE == "table" or SOURCE == "affine":
        return (_load(ptr, row * (K // 8) + span * 32 + word + STEP * 8, inside),)
    elif SOURCE == "affine-32":
        return (_load(ptr, row * (K // 8) + span * 32 + word // 2 + word % 2 * 4 + STEP * 8, inside),)
    elif SOURCE == "runs":
        F: gl.constexpr = ggml_format(FORMAT)
        first = (row * (K // SPAN) + span) * (F.bytes // 4) + word
        return (_load(ptr, first + (STEP // 4 * (F.bytes // 4) + STEP % 4 * 8 + F.low.first // 4), inside),)
    elif SOURCE == "bytes":
        second = word % 2
        first = (row * (K // SPAN) + span) * 68 + (word - second)
        return (
            _load(ptr, first + second + STEP * 17, inside),
            _load(ptr, first + second * 7 + (STEP * 17 + 2), inside),
            _load(ptr, first + (STEP * 17 + 10), inside & (second == 0)),
        )
    else:
        # Two blocks are 105 words; numbers of the second begin in the middle of one.
        first = (row * (K // SET) + span // 2) * 105 + word // 2 + word % 2 * 4
        ODD: gl.constexpr = STEP // 4
        LOW: gl.constexpr = ODD * 52 + STEP % 4 * 8
        HIGH: gl.constexpr = ODD * 52 + 32 + STEP % 4 // 2 * 8
        found = (_load(ptr, first + LOW, inside),)
        if ODD:
            found = found + (_load(ptr, first + LOW + 1, inside),)
        if STEP % 2 == 0:  # the other unit of these bits takes them from this one
            found = found + (_load(ptr, first + HIGH, inside),)
            if ODD:
                found = found + (_load(ptr, first + HIGH + 1, inside),)
        return found


@gluon.jit
def _middle(low, high):
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, 16;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(words):
    """(S, N, 8) as the first and the second word of each thread, (S, N, 4)."""
    return gl.split(words.reshape([words.shape[0], words.shape[1], 4, 2]))


@gluon.jit
def high_bits(words, before, STEP: gl.constexpr, SOURCE: gl.constexpr):
    """What `unit_factors` of this unit and the next need besides its own words. before: of the unit before."""
    if SOURCE != "sixes" or STEP % 2 == 1:
        return before
    elif STEP < 4:
        return words[1]
    else:
        return _middle(words[2], words[3])


@gluon.jit
def unit_factors(words, high, table, bank, STEP: gl.constexpr, DTYPE: gl.constexpr, SOURCE: gl.constexpr):
    """Words (S, N, 8) of unit STEP as numbers (S, N, columns), one tensor of a part, in the order of a left factor."""
    S: gl.constexpr = words[0].shape[0]
    N: gl.constexpr = words[0].shape[1]
    BF16: gl.constexpr = DTYPE == gl.bfloat16
    if SOURCE == "table":
        PROGRAM: gl.constexpr = _program(SOURCE, BF16)
        f = gl.inline_asm_elementwise(
            PROGRAM, _operands(8, 3), (words[0], bank, table), dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
        lower = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        upper = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(lower, upper).reshape([S, N, 4, 2, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4))
        return (w.reshape([S, N, 64]).to(DTYPE, bitcast=True),)
    elif SOURCE == "affine":
        return (unpacked(words[0] ^ SIGNS, 0, 0, "int4", DTYPE, False, False, True),)
    elif SOURCE == "affine-32":
        a, b = _halves(words[0] ^ SIGNS)
        first = unpacked(a, 0, 0, "int4", DTYPE, False, False, True)
        return first, unpacked(b, 0, 0, "int4", DTYPE, False, False, True)
    elif SOURCE == "runs":
        PROGRAM: gl.constexpr = _program(SOURCE, BF16)
        f = gl.inline_asm_elementwise(
            PROGRAM, _operands(8, 1), (words[0],), dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
        return _run(f[0], f[1], f[4], f[5], DTYPE), _run(f[2], f[3], f[6], f[7], DTYPE)
    elif SOURCE == "bytes":
        a, b = _halves(words[0])
        c, d = _halves(words[1])
        e, _ = _halves(words[2])
        first = gl.join(_middle(a, b), _middle(b, c)).reshape([S, N, 8])
        second = gl.join(d, e).reshape([S, N, 8])
        return _bytes(first, DTYPE), _bytes(second, DTYPE)
    else:
        low = words[0]
        if STEP >= 4:
            low = _middle(words[0], words[1])
        first, second = _sixes(low, high, STEP % 2, False, DTYPE)
        third, fourth = _sixes(low, high, STEP % 2, True, DTYPE)
        return first, second, third, fourth


@gluon.jit
def _run(a, b, c, d, DTYPE: gl.constexpr):
    S: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    w = gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 3, 5, 2, 4))
    return w.reshape([S, N, 32]).to(DTYPE, bitcast=True)


@gluon.jit
def _bytes(words, DTYPE: gl.constexpr):
    PROGRAM: gl.constexpr = _program("bytes", DTYPE == gl.bfloat16)
    f = gl.inline_asm_elementwise(PROGRAM, _operands(4, 1), (words,), dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    return _run(f[0], f[1], f[2], f[3], DTYPE)


@gluon.jit
def _sixes(low, high, ODD: gl.constexpr, UPPER: gl.constexpr, DTYPE: gl.constexpr):
    """The two parts of the lower or upper halves of bytes: a thread's words belong to one each."""
    S: gl.constexpr = low.shape[0]
    N: gl.constexpr = low.shape[1]
    PROGRAM: gl.constexpr = _program("sixes", DTYPE == gl.bfloat16, 4 - 2 * ODD - 4 * UPPER, UPPER)
    f = gl.inline_asm_elementwise(PROGRAM, _operands(4, 2), (low, high), dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    w = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3])).to(DTYPE, bitcast=True)
    first, second = gl.split(w.reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 2, 4, 5, 3)))
    return _sixteen(first), _sixteen(second)


@gluon.jit
def _sixteen(w):
    """Thread, number of a register, half of the columns."""
    return w.permute((0, 1, 4, 2, 3)).reshape([w.shape[0], w.shape[1], 16])


@gluon.jit
def part_factor(x, SOURCE: gl.constexpr, RIGHT: gl.constexpr):
    """x (S, M, columns of a part) as the right factor, (S, columns, M)."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    if is_affine(SOURCE):
        return x_factor(x, COLUMNS // 32, "int4", False, RIGHT)
    elif SOURCE == "table":
        x = x.reshape([S, M, 4, 2, 2, 2, 2]).permute((0, 3, 4, 5, 2, 6, 1))
    elif SOURCE == "sixes":
        x = x.reshape([S, M, 4, 2, 2]).permute((0, 3, 2, 4, 1))
    else:
        x = x.reshape([S, M, 4, 2, 2, 2]).permute((0, 3, 5, 2, 4, 1))
    return gl.convert_layout(x.reshape([S, COLUMNS, M]), RIGHT)
