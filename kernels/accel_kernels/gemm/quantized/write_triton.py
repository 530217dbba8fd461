"""Writes what follows a quantized weight's product, for kernels whose sums are (rows of the weight, rows of x)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.epilogue_triton import epilogue, store_sum


@gluon.jit
def write(y, other, first, first_x, weight, up, after, y_ptr, m, n, SCALED: gl.constexpr, GATE: gl.constexpr,
          ACTIVATION: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Rows `first` and on of the weight, whose sums are y, of its gate's `other`, both in the layout OUT, for rows
    `first_x` and on of x.

    SCALED: the sums are; otherwise each row has one scale. m: rows of x; n: of the weight.
    """
    row = gl.expand_dims(first + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, OUT)), 1)
    out = gl.expand_dims(first_x + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, OUT)), 0)
    scales, up_scales = (None, None) if SCALED else (weight.scales, up.scales)
    y = epilogue(y, other, row, row < n, scales, up_scales, after, GATE, ACTIVATION)
    store_sum(y, out.to(gl.int64) * n + row, (out < m) & (row < n), after, y_ptr)


@gluon.jit
def write_row(y, block, weight, up, after, y_ptr, n, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
              num_warps: gl.constexpr):  # fmt: skip
    """One row of x times a block: scaled sums (16,) of as many rows of the weight, or of eight of it and eight of its
    gate's.
    """
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, num_warps], [0, 1])
    if GATE:
        y, other = gl.split(y.reshape([2, 8]).permute((1, 0)))
        y = gl.expand_dims(gl.convert_layout(y, gl.SliceLayout(1, OUT)), 1)
        other = gl.expand_dims(gl.convert_layout(other, gl.SliceLayout(1, OUT)), 1)
    else:
        y = gl.expand_dims(gl.convert_layout(y, gl.SliceLayout(1, OUT)), 1)
        other = y
    write(y, other, block * y.shape[0], 0, weight, up, after, y_ptr, 1, n, True, GATE, ACTIVATION, OUT)
