"""Blocks as factors of the tensor cores, from memory straight into registers: see `mma_operands_triton`.

A unit is 64 columns of a row, of which each of four threads reads eight bytes. It is one product of 64 columns, all with
one scale (`table`), or two of 32, each with a scale and a minimum of its own (`runs`). SOURCE says which.

Places in a table of 16 are looked up two at a time: shared memory has all 256 pairs, 32 times, so that each thread of a
warp has its own bank. It is declared in PTX, since this language gives no addresses of its own shared memory.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.blocks.ggml_triton import ggml_format
from accel_kernels.gemm.quantized.operands.mma_operands_triton import places
from accel_kernels.gemm.quantized.operands.unpacking_triton import pairs

UNIT = gl.constexpr(64)
ADDRESS = gl.constexpr("{\n.shared .align 128 .b8 pairs[32768];\nmov.u32 $0, pairs;\n}")
PUT = gl.constexpr("st.shared.b32 [$1], $2;\nmov.b32 $0, $1;")
AFTER_ALL = gl.constexpr("bar.sync 0;\nmov.b32 $0, $1;")


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
def unit_words(ptr, row, unit, word, inside, K: gl.constexpr, FORMAT: gl.constexpr, SOURCE: gl.constexpr):
    """Words of a unit of rows. word: 0 to 7."""
    if SOURCE == "table":
        place = row * (K // 8) + (unit * 8 + word)
    else:
        F: gl.constexpr = ggml_format(FORMAT)
        place = row * (K // 256 * (F.bytes // 4)) + unit // 4 * (F.bytes // 4) + unit % 4 * 8 + word + F.low.first // 4
    return gl.load(ptr.to(gl.pointer_type(gl.int32)) + place, mask=inside, other=0, eviction_policy="evict_first")


@gluon.jit
def column_of(slot, SOURCE: gl.constexpr):
    """The column in a unit of the slot of x that is multiplied by the number in the same slot of the weight."""
    if SOURCE == "table":
        return slot
    else:
        return slot // 16 * 8 + slot % 16 // 8 * 32 + slot % 8


@gluon.jit
def unit_factors(words, table, bank, DTYPE: gl.constexpr, SOURCE: gl.constexpr, LEFT: gl.constexpr):
    """Words (S, N, 8) as left factors, (S, N, 64) or twice (S, N, 32)."""
    S: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    if SOURCE == "table":
        LOOK_UP: gl.constexpr = _look_up()
        f = gl.inline_asm_elementwise(
            LOOK_UP, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [words, bank, table], dtype=(gl.int16,) * 8, is_pure=True, pack=1
        )
        low = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        high = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(low, high).reshape([S, N, 4, 2, 2, 2, 2]).permute((0, 1, 3, 6, 5, 2, 4)).reshape([S, N, 64])
        return (gl.convert_layout(w.to(DTYPE, bitcast=True), LEFT),)
    else:
        f = pairs(words, 0, 0, "int4", DTYPE, False, False, True)
        return _run(f[0], f[1], f[4], f[5], DTYPE, LEFT), _run(f[2], f[3], f[6], f[7], DTYPE, LEFT)


@gluon.jit
def _run(a, b, c, d, DTYPE: gl.constexpr, LEFT: gl.constexpr):
    S: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    w = gl.join(gl.join(a, b), gl.join(c, d)).reshape([S, N, 4, 2, 2, 2]).permute((0, 1, 3, 5, 2, 4))
    return gl.convert_layout(w.reshape([S, N, 32]).to(DTYPE, bitcast=True), LEFT)


@gluon.jit
def x_factors(x, SOURCE: gl.constexpr, RIGHT: gl.constexpr):
    """Slots (S, M, 64) of x as right factors, (S, 64, M) or twice (S, 32, M)."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    if SOURCE == "table":
        x = x.reshape([S, M, 4, 2, 2, 2, 2]).permute((0, 3, 4, 5, 2, 6, 1)).reshape([S, 64, M])
        return (gl.convert_layout(x, RIGHT),)
    else:
        low, high = gl.split(x.reshape([S, M, 4, 2, 2, 2, 2]).permute((0, 1, 2, 4, 5, 6, 3)))
        low, high = low.permute((0, 3, 5, 2, 4, 1)), high.permute((0, 3, 5, 2, 4, 1))
        return (
            gl.convert_layout(low.reshape([S, 32, M]), RIGHT),
            gl.convert_layout(high.reshape([S, 32, M]), RIGHT),
        )
