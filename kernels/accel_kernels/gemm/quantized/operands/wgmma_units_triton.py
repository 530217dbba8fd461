"""Words of 4 bits as the left factor of a warpgroup's products, 32 or 64 inputs at a time.

As in `wgmma_operands_triton`, a tile is two blocks of rows that alternate by eight. Their words come in boxes of 256
inputs, of which each half is a piece: 32 inputs of a thread, which have one scale. In smaller parts a piece takes fewer
registers while it waits.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.quantized.operands.mma_operands_triton import steps
from accel_kernels.gemm.quantized.operands.unpacking_triton import pairs, zero_point
from accel_kernels.gemm.quantized.operands.wgmma_operands_triton import both


@constexpr_function
def unit_layout(warps, rows, words):
    """(rows, 4 words), neighbors a thread's, as the left factor lies."""
    registers = [*steps(2, 1, 1, words), [8, 0], *steps(2, 0, 16 * warps, rows)]
    lanes = [[0, words], [0, 2 * words], *steps(2, 0, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, steps(2, 0, 16, 16 * warps), [], [rows, 4 * words])


@gluon.jit
def pieces_of(low, high):
    """Two blocks (H, 32) of a box as its halves (2 H, 16)."""
    box = both(low, high)
    return gl.split(box.reshape([box.shape[0], 2, 16]).permute((0, 2, 1)))


@gluon.jit
def units_of(piece, WORDS: gl.constexpr):
    """(N, 16), four words of each thread, as so many of each at a time, (N, 4 WORDS)."""
    N: gl.constexpr = piece.shape[0]
    a, b = gl.split(piece.reshape([N, 4, 2, 2]).permute((0, 1, 3, 2)))
    found = (a.reshape([N, 8]), b.reshape([N, 8]))
    if WORDS == 1:
        found = gl.split(a) + gl.split(b)
    return found


@gluon.jit
def twice(pair, WORDS: gl.constexpr, EXPONENTS: gl.constexpr):
    """What rows of both blocks have, (H, 4) of 16 bits, as (2 H, 4 WORDS) of the bits twice. EXPONENTS: what they have
    are those of bfloat16, of which 2^-127 is half of the least that has all bits.
    """
    bits = both(pair[0], pair[1])
    if EXPONENTS:
        bits = gl.maximum(bits.to(gl.int32) << 7, 0x40) * 0x10001
    else:
        bits = (bits.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    if WORDS == 2:
        bits = gl.join(bits, bits).reshape([bits.shape[0], 8])
    return bits


@gluon.jit
def unit(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, ZEROS: gl.constexpr, LEFT: gl.constexpr,
         num_warps: gl.constexpr):  # fmt: skip
    """8 inputs a word as the left factor. words, and the bits of their scales and zeros: (N, 4 or 8)."""
    N: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = words.shape[1] // 4
    UNIT: gl.constexpr = unit_layout(num_warps, N, WORDS)
    words, scales = gl.convert_layout(words, UNIT), gl.convert_layout(scales, UNIT)
    if ZEROS:
        zeros = gl.convert_layout(zeros, UNIT)
    else:
        zeros = 0
    f = pairs(words, scales, zeros, FORMAT, DTYPE, True, ZEROS, False)
    low = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
    high = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
    # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
    w = gl.join(low, high).reshape([N, 4, WORDS, 2, 2, 2]).permute((0, 2, 5, 4, 1, 3)).reshape([N, 32 * WORDS])
    return gl.convert_layout(w.to(DTYPE, bitcast=True), LEFT)


@gluon.jit
def scales_at(weight, low, high, column, K: gl.constexpr, GROUPS: gl.constexpr):
    """Scales and zeros of a piece as they are in memory: of both blocks' rows, (H, 4) each. low, high: where a row's
    begin; column: of each thread.
    """
    inside, group = column < K, column // (K // GROUPS)
    scales = (
        gl.load(weight.scales + low + group, mask=inside, other=0),
        gl.load(weight.scales + high + group, mask=inside, other=0),
    )
    zeros = scales
    if weight.zeros is not None:
        zeros = (
            gl.load(weight.zeros + low + group, mask=inside, other=0),
            gl.load(weight.zeros + high + group, mask=inside, other=0),
        )
    return scales, zeros


@gluon.jit
def box_scales(weight, low, high, column, K: gl.constexpr, GROUPS: gl.constexpr):
    """The same of a box's two pieces."""
    first = scales_at(weight, low, high, column, K, GROUPS)
    return first, scales_at(weight, low, high, column + 128, K, GROUPS)


@gluon.jit
def scale_pairs(found, WORDS: gl.constexpr, FORMAT: gl.constexpr, DTYPE: gl.constexpr, ZEROS: gl.constexpr):
    """Of `scales_at`, for `unit`."""
    scales, zeros = found
    bits = twice(scales, WORDS, FORMAT == "mxfp4")
    if ZEROS:
        MIDDLE: gl.constexpr = zero_point(FORMAT, DTYPE)
        low, high = (-MIDDLE - zeros[0].to(gl.float32)).to(DTYPE), (-MIDDLE - zeros[1].to(gl.float32)).to(DTYPE)
        return bits, twice((low, high), WORDS, False)
    else:
        return bits, bits
