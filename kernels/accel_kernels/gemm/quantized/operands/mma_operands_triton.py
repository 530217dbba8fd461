"""Factors of mma.m16n8k16 as registers hold them, for kernels that read them there without a detour.

Of the left factor, 16 x 16, a thread (g = lane / 4, t = lane % 4) holds rows g and g + 8. Of each it holds columns 2t,
2t + 1, 2t + 8 and 2t + 9. Of the right factor, 16 x 8, it holds column g and rows of these numbers. The order of what
is summed does not matter, as long as both factors have the same. So a thread reads up to 16 bytes in a row of packed
numbers, which are its columns of several instructions, and as many neighbors of the right factor. Dimensions: warps,
each with columns of its own; rows; columns. J: 32-bit words that a thread holds of a row.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from accel_kernels.gemm.quantized.operands.unpacking_triton import pairs


@constexpr_function
def steps(axes, axis, first, end):
    """Bases of a linear layout: steps of `first`, twice as much and so on below `end`, along one of so many axes."""
    found = []
    while first < end:
        found.append([first if one == axis else 0 for one in range(axes)])
        first *= 2
    return found


@constexpr_function
def _layout(registers, width, warps, shape):
    """Over (warps, rows, columns): four lanes lie `width` columns apart, all lanes hold eight rows."""
    lanes = [[0, 0, width], [0, 0, 2 * width], *steps(3, 1, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, steps(3, 0, 1, warps), [], shape)


@constexpr_function
def words_layout(warps, rows, words):
    """(warps, rows, 4 words): a thread's are neighbors; lanes 0-3 read up to 64 bytes of a row, all of them 8 rows."""
    return _layout(steps(3, 2, 1, words) + steps(3, 1, 8, rows), words, warps, [warps, rows, 4 * words])


@constexpr_function
def scales_layout(warps, rows):
    """(warps, rows, 4): those of a thread's words."""
    return _layout(steps(3, 1, 8, rows), 1, warps, [warps, rows, 4])


@constexpr_function
def x_layout(warps, rows, columns):
    """(warps, rows of x, columns): as many columns in a row as the thread has of the weight."""
    own = columns // 4
    return _layout(steps(3, 2, 1, own) + steps(3, 1, 8, rows), own, warps, [warps, rows, columns])


@constexpr_function
def squares_layout(warps, rows, own):
    """(warps, rows of x, 4, a thread's columns): `x_layout` with its last dimension in two."""
    whole = x_layout(warps, rows, 4 * own)
    four, lanes = ([[w, r, c // own, c % own] for w, r, c in bases] for bases in (whole.reg_bases, whole.lane_bases))
    return gl.DistributedLinearLayout(list(four), list(lanes), steps(4, 0, 1, warps), [], [warps, rows, 4, own])


@gluon.jit
def places(SHARES: gl.constexpr, ROWS: gl.constexpr, LAST: gl.constexpr, layout: gl.constexpr):
    """Indices of the three dimensions, each (.., 1, ..)."""
    share = gl.arange(0, SHARES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    last = gl.arange(0, LAST, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    return (
        gl.expand_dims(gl.expand_dims(share, 1), 2),
        gl.expand_dims(gl.expand_dims(row, 0), 2),
        gl.expand_dims(gl.expand_dims(last, 0), 0),
    )


@gluon.jit
def of_either(ptr, up_ptr, place, inside, upper, GATE: gl.constexpr):
    """What is at these places: with a gate, in the upper rows of a block, of the gate's weight."""
    if GATE:
        lower = gl.load(ptr + place, mask=inside & ~upper, other=0)
        return gl.where(upper, gl.load(up_ptr + place, mask=inside & upper, other=0), lower)
    else:
        return gl.load(ptr + place, mask=inside, other=0)


@gluon.jit
def unpacked(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr,
             ZEROS: gl.constexpr, RAW: gl.constexpr):  # fmt: skip
    """(S, N, 4 J) words as (S, N, columns) in the factor's order. scales, zeros: (S, N, 4), of each thread's words."""
    S: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1]
    J: gl.constexpr = words.shape[2] // 4
    f = pairs(words, _spread(scales, J, SCALED), _spread(zeros, J, ZEROS), FORMAT, DTYPE, SCALED, ZEROS, RAW)
    if FORMAT == "int4":
        low = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3]))
        high = gl.join(gl.join(f[4], f[5]), gl.join(f[6], f[7]))
        # Thread, word, number of a register, half of the instruction's columns, instruction of the word.
        w = gl.join(low, high).reshape([S, N, 4, J, 2, 2, 2])
        w = w.permute((0, 1, 3, 6, 5, 2, 4)).reshape([S, N, 32 * J])
    else:
        w = gl.join(gl.join(f[0], f[1]), gl.join(f[2], f[3])).reshape([S, N, 4, J, 2, 2])
        w = w.permute((0, 1, 3, 5, 2, 4)).reshape([S, N, 16 * J])
    return w.to(DTYPE, bitcast=True)


@gluon.jit
def weight_factor(words, scales, zeros, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr,
                  ZEROS: gl.constexpr, RAW: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """(S, N, 4 J) words as the left factor, (S, N, columns). scales, zeros: (S, N, 4), of each thread's words."""
    return gl.convert_layout(unpacked(words, scales, zeros, FORMAT, DTYPE, SCALED, ZEROS, RAW), layout)


@gluon.jit
def _spread(values, J: gl.constexpr, GIVEN: gl.constexpr):
    """(S, N, 4) as (S, N, 4 J), the bits of each twice in 32."""
    if GIVEN:
        twice = (values.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
        S: gl.constexpr = values.shape[0]
        N: gl.constexpr = values.shape[1]
        if J >= 2:
            twice = gl.join(twice, twice)
        if J == 4:
            twice = gl.join(twice, twice)
        return twice.reshape([S, N, 4 * J])
    else:
        return values


@gluon.jit
def x_factor(x, J: gl.constexpr, FORMAT: gl.constexpr, NEIGHBORS: gl.constexpr, layout: gl.constexpr):
    """(S, M, columns) of x as the right factor (S, columns, M), in the order of `weight_factor`."""
    S: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    if FORMAT == "int4":
        x = x.reshape([S, M, 4, J, 2, 2, 2]).permute((0, 3, 5, 6, 2, 4, 1)).reshape([S, 32 * J, M])
    elif NEIGHBORS:
        x = x.reshape([S, M, 4, J, 2, 2]).permute((0, 3, 4, 2, 5, 1)).reshape([S, 16 * J, M])
    else:
        x = x.reshape([S, M, 4, J, 2, 2]).permute((0, 3, 5, 2, 4, 1)).reshape([S, 16 * J, M])
    return gl.convert_layout(x, layout)


@gluon.jit
def column_sums(right, ROWS: gl.constexpr, MMA: gl.constexpr, LEFT: gl.constexpr):
    """(S, columns, M) of x as the sums of its columns, (S, ROWS, M), every row the same: a product with ones."""
    S: gl.constexpr = right.shape[0]
    M: gl.constexpr = right.shape[2]
    ones = gl.full([S, 16, right.shape[1]], 1.0, right.dtype, LEFT)
    sums = mma_v2(ones, right, gl.zeros([S, 16, M], gl.float32, MMA))
    if ROWS >= 32:
        sums = gl.join(sums, sums).permute((0, 3, 1, 2)).reshape([S, 32, M])
    if ROWS >= 64:
        sums = gl.join(sums, sums).permute((0, 3, 1, 2)).reshape([S, 64, M])
    return gl.convert_layout(sums, MMA)
