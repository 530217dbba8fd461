"""The left factor of a warpgroup's products, m64 n k16, out of words of a quantized weight: see `skinny_wgmma`.

Warp w of a warpgroup holds rows 16 w and on, a thread of it what `mma_operands_triton` says of mma.m16n8k16. A tile is
two blocks of rows, which alternate by eight. Of each row of a block a thread reads 16 bytes of either half of a box of
128. Lanes 0-7 then have two rows' halves, four rows apart: eight different sixteenths in the rings' 128-byte swizzle,
so no bank conflict. Eight rows therefore stand in another order in the factor, and in the sums, until they are written:
row (b2, b1, b0) at place (b1, b0, b2).
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.quantized.operands.mma_operands_triton import of_either, steps, unpacked


@constexpr_function
def half_layout(warps, rows, words):
    """(rows, 32 words) of a box, 4 neighbors of either half of them a thread's; or, with `words` 1, (rows, 4)."""
    width = min(words, 4)
    registers = steps(2, 1, 1, width) + ([[0, 16]] if words > 4 else []) + steps(2, 0, 8 * warps, rows)
    lanes = [[0, width], [0, 2 * width], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, steps(2, 0, 8, 8 * warps), [], [rows, 4 * words])


@constexpr_function
def piece_layout(warps, rows):
    """(1, rows, 16 words), registers in the order in which scales come to be."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0], *steps(3, 1, 16 * warps, rows)]
    lanes = [[0, 0, 4], [0, 0, 8], *steps(3, 1, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, steps(3, 1, 16, 16 * warps), [], [1, rows, 16])


@gluon.jit
def both(low, high):
    """Two blocks (H, W) as (2 H, W) in the factor's order."""
    H: gl.constexpr = low.shape[0]
    W: gl.constexpr = low.shape[1]
    rows = gl.join(low, high).reshape([H // 8, 2, 2, 2, W, 2])
    return rows.permute((0, 5, 2, 3, 1, 4)).reshape([2 * H, W])


@gluon.jit
def blocks(acc):
    """The two blocks of (2 H, W), their rows as in memory."""
    H: gl.constexpr = acc.shape[0] // 2
    W: gl.constexpr = acc.shape[1]
    rows = acc.reshape([H // 8, 2, 2, 2, 2, W])
    return gl.split(rows.permute((0, 4, 2, 3, 5, 1)).reshape([H, W, 2]))


@gluon.jit
def weight_row(place, tile, n, H: gl.constexpr, GATE: gl.constexpr):
    """The row of the weight, or of its gate's, at this place of a tile in the factor's order."""
    row = place // 16 * 8 + (place & 1) * 4 + (place >> 1 & 3)
    if GATE:
        return gl.minimum(tile * H + row, n - 1)
    else:
        return gl.minimum(tile * 2 * H + (place >> 3 & 1) * H + row, n - 1)


@gluon.jit
def row_scales(weight, up, step, high, n, K: gl.constexpr, GROUPS: gl.constexpr, BOXES: gl.constexpr,
               PIECE: gl.constexpr, H: gl.constexpr, GATE: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Scales and zeros of a step's two pieces as they are in memory, each (2 H,): one scale covers a row of a piece.

    ROWS: the layout of a tile's rows."""
    place = gl.arange(0, 2 * H, layout=ROWS)
    row = weight_row(place, step // BOXES, n, H, GATE) * GROUPS
    upper = (place >> 3 & 1) == 1
    found = ()
    for piece in gl.static_range(2):
        column = step % BOXES * (2 * PIECE) + piece * PIECE
        at, inside = row + column // (K // GROUPS), (column < K) & (step < high)
        s = of_either(weight.scales, up.scales, at, inside, upper, GATE)
        z = s
        if weight.zeros is not None:
            z = of_either(weight.zeros, up.zeros, at, inside, upper, GATE)
        found = found + ((s, z),)
    return found


@gluon.jit
def scales_and_zeros(weight, up, step, high, n, K: gl.constexpr, GROUPS: gl.constexpr, BOXES: gl.constexpr,
                     PIECE: gl.constexpr, H: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """Scales and zeros of a step's two pieces as they are in memory: of each thread's words."""
    L: gl.constexpr = half_layout(num_warps, H, 1)
    first = step // BOXES * (H if GATE else 2 * H)
    row = gl.expand_dims(first + gl.arange(0, H, layout=gl.SliceLayout(1, L)), 1)
    thread = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, L)), 0)
    low, high_row = gl.minimum(row, n - 1), gl.minimum(row if GATE else row + H, n - 1)
    found = ()
    for piece in gl.static_range(2):
        column = step % BOXES * (2 * PIECE) + piece * PIECE + thread * (PIECE // 4)
        inside = (column < K) & (step < high)
        group = column // (K // GROUPS)
        s = gl.load(weight.scales + low * GROUPS + group, mask=inside, other=0.0)
        t = gl.load(up.scales + high_row * GROUPS + group, mask=inside, other=0.0)
        z, v = s, t
        if weight.zeros is not None:
            z = gl.load(weight.zeros + low * GROUPS + group, mask=inside, other=0)
            v = gl.load(up.zeros + high_row * GROUPS + group, mask=inside, other=0)
        found = found + ((s, t, z, v),)
    return found


@gluon.jit
def factor(words, scaling, FORMAT: gl.constexpr, DTYPE: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr,
           RAW: gl.constexpr, ZERO_POINT: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr):  # fmt: skip
    """A piece (rows, 16 words) as the left factor. RAW: as of `pairs`."""
    N: gl.constexpr = words.shape[0]
    scales, zeros = 0, 0
    if SCALED:
        scales = both(scaling[0], scaling[1]).reshape([1, N, 4])
    if ZEROS:
        zeros = (-ZERO_POINT - both(scaling[2], scaling[3]).to(gl.float32)).to(DTYPE).reshape([1, N, 4])
    words = gl.convert_layout(words.reshape([1, N, 16]), piece_layout(num_warps, N))
    left = unpacked(words, scales, zeros, FORMAT, DTYPE, SCALED, ZEROS, RAW)
    return gl.convert_layout(left.reshape([N, left.shape[2]]), layout)
