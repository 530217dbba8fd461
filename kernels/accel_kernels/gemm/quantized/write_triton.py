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
