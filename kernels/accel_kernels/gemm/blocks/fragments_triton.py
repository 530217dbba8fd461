"""Blocks as factors of the tensor cores, from memory straight into registers: see `mma_operands_triton`.

A set is 512 columns of a row, two spans of four units. A unit is 64 columns, of which four threads read what they
multiply. Columns of a unit with one scale are one product, a part. SOURCE, a name of a format's own, says how:

- "table": places in a table of 16, two to a byte, one scale to a unit;
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
from accel_kernels.gemm.quantized.operands.mma_operands_triton import places
from accel_kernels.gemm.quantized.operands.unpacking_triton import pairs

UNIT, SPAN, SET = gl.constexpr(64), gl.constexpr(256), gl.constexpr(512)
ADDRESS = gl.constexpr("{\n.shared .align 128 .b8 pairs[32768];\nmov.u32 $0, pairs;\n}")
PUT = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, $1;")
AFTER_ALL = gl.constexpr("bar.sync 0;\nmov.b32 $0, $1;")


@constexpr_function
def parts_of(source):
    """Products of a unit, each of as many columns."""
    return {"table": 1, "runs": 2, "bytes": 2, "sixes": 4}[source]


@constexpr_function
def part_column(source, unit, part):
    """The first column of a unit's part in its span."""
    if source == "sixes":
        return unit // 2 * 128 + unit % 2 * 32 + part // 2 * 64 + part % 2 * 16
    return unit * 64 + part * 64 // parts_of(source)


@constexpr_function
def _look_up():
    """PTX: the pairs of a word's four bytes. $8: the word, $9: the thread's bank, $10: the table."""
    lines = [".reg .b32 a<4>, p<4>;"]
    for byte in range(4):
        lines.append(f"{'shl' if byte == 0 else 'shr'}.b32 a{byte}, $8, {abs(8 * byte - 7)};")
        lines.append(f"lop3.b32 a{byte}, a{byte}, 0x7f80, $9, 0xea;")
        lines.append(f"add.u32 a{byte}, a{byte}, $10;")
        lines.append(f"ld.shared.b32 p{byte}, [a{byte}];")
        lines.append(f"mov.b32 {{${2 * byte}, ${2 * byte + 1}}}, p{byte};")
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def _six_bits(shift, upper, bf16):
    """PTX: four numbers less 32. $4: the word of their 4 bits, lower or upper halves; $5: that of their 2 bits."""
    kind, base, less = ("bf16x2", "0x43434343", "0xc320c320") if bf16 else ("f16x2", "0x64646464", "0xe420e420")
    one = "0x3f803f80" if bf16 else "0x3c003c00"
    lines = [".reg .b32 l, h, p<2>, one, less;", f"mov.b32 one, {one};", f"mov.b32 less, {less};"]
    lines.append("shr.u32 l, $4, 4;\nand.b32 l, l, 0x0f0f0f0f;" if upper else "and.b32 l, $4, 0x0f0f0f0f;")
    lines.append("mov.b32 h, $5;" if shift == 0 else f"{'shl' if shift > 0 else 'shr'}.b32 h, $5, {abs(shift)};")
    lines.append("lop3.b32 l, h, 0x30303030, l, 0xea;")
    for pair, order in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 p{pair}, l, {base}, {order};")
        lines.append(f"fma.rn.{kind} p{pair}, p{pair}, one, less;")
        lines.append(f"mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, p{pair};")
    return "{\n" + "\n".join(lines) + "\n}"


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
    if SOURCE == "table":
        return (_load(ptr, row * (K // 8) + span * 32 + word + STEP * 8, inside),)
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
def unit_factors(words, high, table, bank, STEP: gl.constexpr, DTYPE: gl.constexpr, SOURCE: gl.constexpr,
                 LEFT: gl.constexpr):  # fmt: skip
    """Words (S, N, 8) of unit STEP as left factors, (S, N, columns), one of a part."""
    S: gl.constexpr = words[0].shape[0]
    N: gl.constexpr = words[0].shape[1]
    if SOURCE == "table":
        LOOK_UP: gl.constexpr = _look_up()
        f = gl.inline_asm_elementwise(
            LOOK_UP, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words[0], bank, table], dtype=(gl.int16,) * 8, is_pure=True,
            pack=1,
        )  # fmt: skip
        lower = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        upper = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(lower, upper).reshape([S, N, 4, 2, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4))
        return (gl.convert_layout(w.reshape([S, N, 64]).to(DTYPE, bitcast=True), LEFT),)
    elif SOURCE == "runs":
        f = pairs(words[0], 0, 0, "int4", DTYPE, False, False, True)
        return _run(f[0], f[1], f[4], f[5], DTYPE, LEFT), _run(f[2], f[3], f[6], f[7], DTYPE, LEFT)
    elif SOURCE == "bytes":
        a, b = _halves(words[0])
        c, d = _halves(words[1])
        e, _ = _halves(words[2])
        f = pairs(gl.join(_middle(a, b), _middle(b, c)).reshape([S, N, 8]), 0, 0, "int8", DTYPE, False, False, True)
        g = pairs(gl.join(d, e).reshape([S, N, 8]), 0, 0, "int8", DTYPE, False, False, True)
        return _run(f[0], f[1], f[2], f[3], DTYPE, LEFT), _run(g[0], g[1], g[2], g[3], DTYPE, LEFT)
    else:
        low = words[0]
        if STEP >= 4:
            low = _middle(words[0], words[1])
        first, second = _sixes(low, high, STEP % 2, False, DTYPE, LEFT)
        third, fourth = _sixes(low, high, STEP % 2, True, DTYPE, LEFT)
        return first, second, third, fourth


@gluon.jit
def _run(a, b, c, d, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    S: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    w = gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 3, 5, 2, 4))
    return gl.convert_layout(w.reshape([S, N, 32]).to(DTYPE, bitcast=True), LEFT)


@gluon.jit
def _sixes(low, high, ODD: gl.constexpr, UPPER: gl.constexpr, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    """The two parts of the lower or upper halves of bytes: a thread's words belong to one each."""
    S: gl.constexpr = low.shape[0]
    N: gl.constexpr = low.shape[1]
    PROGRAM: gl.constexpr = _six_bits(4 - 2 * ODD - 4 * UPPER, UPPER, DTYPE == gl.bfloat16)
    f = gl.inline_asm_elementwise(PROGRAM, "=h,=h,=h,=h,r,r", [low, high], dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    w = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3])).to(DTYPE, bitcast=True)
    first, second = gl.split(w.reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 2, 4, 5, 3)))
    return _sixteen(first, LEFT), _sixteen(second, LEFT)


@gluon.jit
def _sixteen(w, LEFT: gl.constexpr):
    """Thread, number of a register, half of the columns."""
    w = w.permute((0, 1, 4, 2, 3)).reshape([w.shape[0], w.shape[1], 16])
    return gl.convert_layout(w, LEFT)


@gluon.jit
def x_factor(x, SOURCE: gl.constexpr, RIGHT: gl.constexpr):
    """x (S, M, columns of a part) as the right factor, (S, columns, M)."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    if SOURCE == "table":
        x = x.reshape([S, M, 4, 2, 2, 2, 2]).permute((0, 3, 4, 5, 2, 6, 1))
    elif SOURCE == "sixes":
        x = x.reshape([S, M, 4, 2, 2]).permute((0, 3, 2, 4, 1))
    elif SOURCE == "bytes" and x.dtype == gl.float16:  # `pairs` are neighbors
        x = x.reshape([S, M, 4, 2, 2, 2]).permute((0, 3, 4, 2, 5, 1))
    else:
        x = x.reshape([S, M, 4, 2, 2, 2]).permute((0, 3, 5, 2, 4, 1))
    return gl.convert_layout(x.reshape([S, COLUMNS, M]), RIGHT)
