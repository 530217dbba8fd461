"""Writes what follows a quantized weight's product, for kernels whose sums are (rows of the weight, rows of x)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from accel_kernels.gemm.epilogue_triton import epilogue


@gluon.jit
def write(y, other, first, s_ptr, us_ptr, b_ptr, c_ptr, r_ptr, y_ptr, m, n, scale, SCALED: gl.constexpr,
          HAS_BIAS: gl.constexpr, GATE: gl.constexpr, RESIDUAL: gl.constexpr, KIND: gl.constexpr,
          OUT: gl.constexpr):  # fmt: skip
    """Rows `first` and on of the weight, whose sums are y, of its gate's `other`, both in the layout OUT.

    SCALED: the sums are; otherwise each row has one scale. m: rows of x; n: of the weight.
    """
    row = gl.expand_dims(first + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, OUT)), 1)
    out = gl.expand_dims(gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, OUT)), 0)
    y = epilogue(y, other, row, row < n, s_ptr, us_ptr, b_ptr, c_ptr, scale, not SCALED, HAS_BIAS, GATE, KIND)
    place, mask = out.to(gl.int64) * n + row, (out < m) & (row < n)
    if RESIDUAL:
        y += gl.load(r_ptr + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)
