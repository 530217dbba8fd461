"""Sums of a warpgroup's tile as they go through memory: 16 bytes of each thread, 512 of a warp side by side.

As the instruction leaves them a thread has two neighbors of a row here and two there, and an address for each.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.quantized.operands.mma_operands_triton import steps


@constexpr_function
def flat_layout(warps, numbers):
    """Of sums in a row: every thread has four neighbors of each 128 of its warp."""
    registers = [[1], [2], *steps(1, 0, 128 * warps, numbers)]
    return gl.DistributedLinearLayout(registers, steps(1, 0, 4, 128), steps(1, 0, 128, 128 * warps), [], [numbers])


@gluon.jit
def flat(acc, num_warps: gl.constexpr, layout: gl.constexpr):
    """Sums of a tile as one row; each stays in a register of the same thread."""
    REPEATS: gl.constexpr = acc.shape[0] // (16 * num_warps)
    parts = acc.reshape([REPEATS, num_warps, 2, 8, acc.shape[1] // 8, 4, 2])
    parts = parts.permute((0, 4, 1, 3, 5, 2, 6)).reshape([acc.shape[0] * acc.shape[1]])
    return gl.convert_layout(parts, layout, assert_trivial=True)


@gluon.jit
def unflat(sums, ROWS: gl.constexpr, COLUMNS: gl.constexpr, num_warps: gl.constexpr, layout: gl.constexpr):
    """What `flat` was made of, in its layout."""
    REPEATS: gl.constexpr = ROWS // (16 * num_warps)
    parts = sums.reshape([REPEATS, COLUMNS // 8, num_warps, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(parts.reshape([ROWS, COLUMNS]), layout, assert_trivial=True)
