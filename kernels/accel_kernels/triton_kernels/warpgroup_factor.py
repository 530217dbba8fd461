"""The left factor of a warpgroup's products, m64 n k16, out of words of a quantised weight: see `quantised_wgmma`.

Warp w of a warpgroup holds rows 16 w and on, a thread of it what `fragments` says of mma.m16n8k16. A tile is two blocks
of rows, which alternate by eight. Of each row of a block a thread reads 32 bytes of a box of 128, in two pieces of 16:
lanes 0-7 then read eight different sixteenths of the rings' 128-byte swizzle, of two rows, without a bank conflict.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.triton_kernels.fragments import unpacked


@constexpr_function
def half_layout(warps, rows, words):
    """(rows, 4 words) of a block: eight rows to a warp, each in four lanes, whose words are neighbours."""
    registers, lanes, shares = [], [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]], []
    while 2 ** len(registers) < words:
        registers.append([0, 2 ** len(registers)])
    height = 8
    while height < 8 * warps:
        shares.append([height, 0])
        height *= 2
    while height < rows:
        registers.append([height, 0])
        height *= 2
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [rows, 4 * words])


@constexpr_function
def piece_layout(warps, rows):
    """(1, rows, 16 words), registers in the order in which scales come to be."""
    registers, lanes = [[0, 0, 1], [0, 0, 2], [0, 8, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    shares, height = [], 16
    while height < 16 * warps:
        shares.append([0, height, 0])
        height *= 2
    while height < rows:
        registers.append([0, height, 0])
        height *= 2
    return gl.DistributedLinearLayout(registers, lanes, shares, [], [1, rows, 16])


@gluon.jit
def both(low, high):
    """Two blocks (H, W) as (2 H, W), their rows alternating by eight."""
    H: gl.constexpr = low.shape[0]
    W: gl.constexpr = low.shape[1]
    return gl.join(low, high).reshape([H // 8, 8, W, 2]).permute((0, 3, 1, 2)).reshape([2 * H, W])


@gluon.jit
def blocks(acc):
    """The two blocks of (2 H, W)."""
    H: gl.constexpr = acc.shape[0] // 2
    W: gl.constexpr = acc.shape[1]
    return gl.split(acc.reshape([H // 8, 2, 8, W]).permute((0, 2, 3, 1)).reshape([H, W, 2]))


@gluon.jit
def scales_and_zeros(s_ptr, z_ptr, us_ptr, uz_ptr, step, high, n, K: gl.constexpr, GROUPS: gl.constexpr,
                     BOXES: gl.constexpr, PIECE: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr,
                     ZEROS: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Scales and zeros of a step as they are in memory: of a thread's words, of either half of them where SPLIT."""
    L: gl.constexpr = half_layout(num_warps, H, 1)
    first = step // BOXES * (H if GATE else 2 * H)
    row = gl.expand_dims(first + gl.arange(0, H, layout=gl.SliceLayout(1, L)), 1)
    thread = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0)
    low, high_row = gl.minimum(row, n - 1), gl.minimum(row if GATE else row + H, n - 1)
    found = ()
    for piece in gl.static_range(2 if SPLIT else 1):
        column = step % BOXES * (2 * PIECE) + thread * (PIECE // 2) + piece * (PIECE // 4)
        inside = (column < K) & (step < high)
        group = column // (K // GROUPS)
        s = gl.load(s_ptr + low * GROUPS + group, mask=inside, other=0.0)
        t = gl.load(us_ptr + high_row * GROUPS + group, mask=inside, other=0.0)
        z, v = s, t
        if ZEROS:
            z = gl.load(z_ptr + low * GROUPS + group, mask=inside, other=0)
            v = gl.load(uz_ptr + high_row * GROUPS + group, mask=inside, other=0)
        found = found + ((s, t, z, v),)
    return found


@gluon.jit
def factor(words, scaling, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr,
            MIDDLE: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """A piece (rows, 16 words) as the left factor."""
    N: gl.constexpr = words.shape[0]
    scales, zeros = 0, 0
    if SCALED:
        scales = both(scaling[0], scaling[1]).reshape([1, N, 4])
    if ZEROS:
        zeros = (-MIDDLE - both(scaling[2], scaling[3]).to(gl.float32)).to(DTYPE).reshape([1, N, 4])
    words = gl.convert_layout(words.reshape([1, N, 16]), piece_layout(num_warps, N))
    left = unpacked(words, scales, zeros, FORMAT, DTYPE, SCALED, ZEROS, False)
    return gl.convert_layout(left.reshape([N, left.shape[2]]), layout)
