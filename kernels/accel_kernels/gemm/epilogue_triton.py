"""The `Epilogue` of a product inside kernels: what follows its sums, in fp32, before anything is written."""

import triton
import triton.language as tl

from accel_kernels.elementwise.activations_triton import activate


@triton.jit
def epilogue(y, other, n_idx, n_mask, s_ptr, us_ptr, b_ptr, c_ptr, scale, BY_ROW: tl.constexpr,
             HAS_BIAS: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Scales, bias, activation, gate and scale of a block of sums; the residual is added by whoever writes.

    y, other: the sums of the weight and of its gate's. n_idx: rows of the weight, as they lie in y. BY_ROW: those rows
    have scales, s and us, which are still to be multiplied.
    """
    if BY_ROW:
        y *= tl.load(s_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(b_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
    y = activate(y, KIND)
    if GATE:
        if BY_ROW:
            other *= tl.load(us_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            other += tl.load(c_ptr + n_idx, mask=n_mask, other=0.0).to(tl.float32)
        y *= other
    return y * scale
