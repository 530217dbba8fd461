"""One token times rows of experts in MXFP4, for `gemv_triton.py`: 16 bytes of a row at a time, which have one scale.

Lanes lie along a row and warps across rows, so that a thread unpacks x once for all of its rows.
"""

import triton
import triton.language as tl

from accel_kernels.gemm.quantized.gemv_triton import products, quad_words, vector


@triton.jit
def mxfp4_sums(
    x_ptr, weight, row, other, K: tl.constexpr, BOTH: tl.constexpr, BLOCK_Q: tl.constexpr, UNPACK_MODE: tl.constexpr
):  # fmt: skip
    """x times rows (N,) of the weight, and times as many others where BOTH, else the same twice."""
    QUADS: tl.constexpr = K // 32
    DTYPE: tl.constexpr = None if x_ptr.dtype.element_ty == tl.float32 else x_ptr.dtype.element_ty
    q_idx = tl.arange(0, BLOCK_Q)
    w, s = _groups(weight, row, q_idx, QUADS)
    u, t = w, s
    if BOTH:
        u, t = _groups(weight, other, q_idx, QUADS)
    acc = tl.zeros((BLOCK_Q, row.shape[0]), tl.float32)
    acc_u = acc
    for start in tl.static_range(0, QUADS, BLOCK_Q):
        at = start + q_idx
        next_w, next_s, next_u, next_t = w, s, u, t
        if start + BLOCK_Q < QUADS:
            next_w, next_s = _groups(weight, row, at + BLOCK_Q, QUADS)
            if BOTH:
                next_u, next_t = _groups(weight, other, at + BLOCK_Q, QUADS)
        if DTYPE is None:
            xs = vector(x_ptr, at, K, DTYPE, 8)
        else:
            xs = vector(x_ptr.to(tl.pointer_type(tl.int64)), at, K, DTYPE, 8)
        over = tl.zeros((BLOCK_Q, 4), tl.float32)
        acc += products(w, s, s, xs, over, over, 65536, "mxfp4", True, False, UNPACK_MODE, 8)
        if BOTH:
            acc_u += products(u, t, t, xs, over, over, 65536, "mxfp4", True, False, UNPACK_MODE, 8)
        w, s, u, t = next_w, next_s, next_u, next_t
    if BOTH:
        return tl.sum(acc, axis=0), tl.sum(acc_u, axis=0)
    else:
        y = tl.sum(acc, axis=0)
        return y, y


@triton.jit
def _groups(weight, row, q_idx, QUADS: tl.constexpr):
    """Words (quads, rows, 4) and scales (quads, rows) of these groups; beyond the last zeros, with any scale."""
    words = quad_words(weight, row, q_idx, tl.full((1, 1, 1), 1, tl.int1), QUADS * 4, False)
    return words, tl.load(weight.scales + row[None, :] * QUADS + tl.minimum(q_idx, QUADS - 1)[:, None])
