"""Blocks as factors of the tensor cores, from memory straight into registers: see `mma_operands_triton`.

A set is 512 columns of a row, two spans of four units. A unit is 64 columns, of which four threads read what they
multiply. Columns of a unit with one scale are one product, a part. SOURCE, a name of a format's own, says how:

- "table": places in a table of 16, two to a byte, one scale to a unit;
- "runs": 32 bytes of 4-bit numbers, the lower halves before the upper ones, with a scale and a minimum each, and maybe
  a bit above;
- "halves": two blocks of a scale and 16 bytes, of which the lower halves are before the upper ones;
- "bytes": two blocks of 32 bytes and a scale before them;
- "sixes": 4 bits and 2 bits of numbers with a scale to 16.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.blocks.fragments.unit_numbers_triton import operands, program
from accel_kernels.gemm.blocks.ggml_triton import ggml_format

UNIT, SPAN, SET = gl.constexpr(64), gl.constexpr(256), gl.constexpr(512)


@constexpr_function
def unit_parts(source):
    """Products of a unit, each of as many columns."""
    return {"table": 1, "runs": 2, "halves": 2, "bytes": 2, "sixes": 4}[source]


@constexpr_function
def has_high(name, source):
    """Whether numbers have a bit above those of a run."""
    return source == "runs" and ggml_format(name).high is not None


@constexpr_function
def part_column(source, unit, part):
    """The first column of a unit's part in its span."""
    if source == "sixes":
        return unit // 2 * 128 + unit % 2 * 32 + part // 2 * 64 + part % 2 * 16
    return unit * 64 + part * 64 // unit_parts(source)


@gluon.jit
def _load(ptr, place, inside):
    return gl.load(ptr.to(gl.pointer_type(gl.int32)) + place, mask=inside, other=0)


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
        found = (_load(ptr, first + (STEP // 4 * (F.bytes // 4) + STEP % 4 * 8 + F.low.first // 4), inside),)
        if F.high is not None and STEP % 4 == 0:  # other units of the span take their bits from this one
            found = found + (_load(ptr, first + (STEP // 4 * (F.bytes // 4) + F.high.first // 4), inside),)
        return found
    elif SOURCE == "halves":
        second = word % 2
        first = (row * (K // SPAN) + span) * 36 + word // 2
        return (
            _load(ptr, first + second + STEP * 9, inside),
            _load(ptr, first + (STEP * 9 + 5), inside & (second == 0)),
        )
    elif SOURCE == "bytes":
        second = word % 2
        first = (row * (K // SPAN) + span) * 68
        return (
            _load(ptr, first + word + STEP * 17, inside),
            _load(ptr, first + (word - second) + second * 7 + (STEP * 17 + 2), inside),
            _load(ptr, first + (word - second) + (STEP * 17 + 10), inside & (second == 0)),
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
    if len(words) == 1 or SOURCE == "bytes" or SOURCE == "halves":
        return before
    elif SOURCE == "runs":
        return words[1]
    elif STEP % 2 == 1:
        return before
    elif STEP < 4:
        return words[1]
    else:
        return _middle(words[2], words[3])


@gluon.jit
def unit_factors(words, high, table, bank, scales, STEP: gl.constexpr, DTYPE: gl.constexpr, FORMAT: gl.constexpr,
                 SOURCE: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """Words (S, N, 8) of unit STEP as numbers (S, N, columns), one tensor of a part, in the order of a left factor.

    scales: where SCALED of each thread's words, (S, N, 8), of every part, as `part_scales` has them: numbers are
    values then, rounded to DTYPE.
    """
    S: gl.constexpr = words[0].shape[0]
    N: gl.constexpr = words[0].shape[1]
    BF16: gl.constexpr = DTYPE == gl.bfloat16
    HIGH: gl.constexpr = has_high(FORMAT, SOURCE)
    if SOURCE == "table":
        PROGRAM: gl.constexpr = program(SOURCE, BF16, SCALED)
        given = (words[0], bank, table)
        if SCALED:
            given = given + (_like(scales[0], words[0]),)
        f = gl.inline_asm_elementwise(
            PROGRAM, operands(8, 3, SCALED), given, dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
        lower = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        upper = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(lower, upper).reshape([S, N, 4, 2, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4))
        return (w.reshape([S, N, 64]).to(DTYPE, bitcast=True),)
    elif SOURCE == "runs":
        PROGRAM: gl.constexpr = program(SOURCE, BF16, SCALED, STEP % 4 * 2, HIGH)
        given = (words[0],)
        if HIGH:
            given = given + (high,)
        if SCALED:
            given = given + (_like(scales[0], words[0]), _like(scales[2], words[0]))
            given = given + (_like(scales[1], words[0]), _like(scales[3], words[0]))
        f = gl.inline_asm_elementwise(
            PROGRAM, operands(8, 1 + HIGH, 4 * SCALED), given, dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
        return _run(f[0], f[1], f[4], f[5], DTYPE), _run(f[2], f[3], f[6], f[7], DTYPE)
    elif SOURCE == "halves":
        a, b = _halves(words[0])
        other, _ = _halves(words[1])
        if SCALED:
            first, _ = _halves(scales[0])
            second, _ = _halves(scales[1])
            return _nibbles(_middle(a, b), first, True, DTYPE), _nibbles(other, second, True, DTYPE)
        else:
            return _nibbles(_middle(a, b), 0, False, DTYPE), _nibbles(other, 0, False, DTYPE)
    elif SOURCE == "bytes":
        a, b = _halves(words[0])
        c, d = _halves(words[1])
        e, _ = _halves(words[2])
        first = gl.join(_middle(a, b), _middle(b, c)).reshape([S, N, 8])
        second = gl.join(d, e).reshape([S, N, 8])
        if SCALED:
            return _bytes(first, scales[0], True, DTYPE), _bytes(second, scales[1], True, DTYPE)
        else:
            return _bytes(first, 0, False, DTYPE), _bytes(second, 0, False, DTYPE)
    else:
        low = words[0]
        if STEP >= 4:
            low = _middle(words[0], words[1])
        if SCALED:
            one, other = _of_word(scales[0], scales[1]), _of_word(scales[2], scales[3])
            first, second = _sixes(low, high, one, STEP % 2, False, True, DTYPE)
            third, fourth = _sixes(low, high, other, STEP % 2, True, True, DTYPE)
        else:
            first, second = _sixes(low, high, 0, STEP % 2, False, False, DTYPE)
            third, fourth = _sixes(low, high, 0, STEP % 2, True, False, DTYPE)
        return first, second, third, fourth


@gluon.jit
def _like(values, words):
    return gl.convert_layout(values, words.type.layout)


@gluon.jit
def _run(a, b, c, d, DTYPE: gl.constexpr):
    S: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    w = gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 3, 5, 2, 4))
    return w.reshape([S, N, 32]).to(DTYPE, bitcast=True)


@gluon.jit
def _bytes(words, scale, SCALED: gl.constexpr, DTYPE: gl.constexpr):
    PROGRAM: gl.constexpr = program("bytes", DTYPE == gl.bfloat16, SCALED)
    given = (words,)
    if SCALED:
        given = given + (_like(scale, words),)
    f = gl.inline_asm_elementwise(PROGRAM, operands(4, 1, SCALED), given, dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    return _run(f[0], f[1], f[2], f[3], DTYPE)


@gluon.jit
def _nibbles(words, scale, SCALED: gl.constexpr, DTYPE: gl.constexpr):
    """A word of each thread, (S, N, 4)."""
    PROGRAM: gl.constexpr = program("halves", DTYPE == gl.bfloat16, SCALED)
    given = (words,)
    if SCALED:
        given = given + (_like(scale, words),)
    f = gl.inline_asm_elementwise(PROGRAM, operands(8, 1, SCALED), given, dtype=(gl.int16,) * 8, is_pure=True, pack=1)
    lower = gl.join(gl.join(f[0], f[1]), gl.join(f[4], f[5]))
    upper = gl.join(gl.join(f[2], f[3]), gl.join(f[6], f[7]))
    w = gl.join(lower, upper).permute((0, 1, 5, 4, 2, 3)).reshape([words.shape[0], words.shape[1], 32])
    return w.to(DTYPE, bitcast=True)


@gluon.jit
def _of_word(first, second):
    """Of a thread's two words the first's of `first`, the second's of `second`, which have both alike."""
    a, _ = _halves(first)
    b, _ = _halves(second)
    return gl.join(a, b).reshape([first.shape[0], first.shape[1], 8])


@gluon.jit
def _sixes(low, high, scale, ODD: gl.constexpr, UPPER: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr):
    """The two parts of the lower or upper halves of bytes: a thread's words belong to one each."""
    S: gl.constexpr = low.shape[0]
    N: gl.constexpr = low.shape[1]
    PROGRAM: gl.constexpr = program("sixes", DTYPE == gl.bfloat16, SCALED, 4 - 2 * ODD - 4 * UPPER, UPPER)
    given = (low, high)
    if SCALED:
        given = given + (_like(scale, low),)
    f = gl.inline_asm_elementwise(PROGRAM, operands(4, 2, SCALED), given, dtype=(gl.int16,) * 4, is_pure=True, pack=1)
    w = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3])).to(DTYPE, bitcast=True)
    first, second = gl.split(w.reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 2, 4, 5, 3)))
    return _sixteen(first), _sixteen(second)


@gluon.jit
def _sixteen(w):
    """Thread, number of a register, half of the columns."""
    return w.permute((0, 1, 4, 2, 3)).reshape([w.shape[0], w.shape[1], 16])


@gluon.jit
def slot_column(slot, SOURCE: gl.constexpr):
    """The column of a part that a thread has in this slot, of as many as a part has columns."""
    if SOURCE == "halves":
        return slot // 8 * 4 + slot % 8 // 4 * 16 + slot % 4
    else:
        return slot


@gluon.jit
def part_factor(x, SOURCE: gl.constexpr, RIGHT: gl.constexpr):
    """x (S, M, slots of a part) as the right factor, (S, columns, M)."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    if SOURCE == "table":
        x = x.reshape([S, M, 4, 2, 2, 2, 2]).permute((0, 3, 4, 5, 2, 6, 1))
    elif SOURCE == "sixes":
        x = x.reshape([S, M, 4, 2, 2]).permute((0, 3, 2, 4, 1))
    else:
        x = x.reshape([S, M, 4, 2, 2, 2]).permute((0, 3, 5, 2, 4, 1))
    return gl.convert_layout(x.reshape([S, COLUMNS, M]), RIGHT)
