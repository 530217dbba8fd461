"""The uniform numbers of `philox.py` inside kernels; the same bit for bit."""

import triton
import triton.language as tl


@triton.jit
def uniform_of(seed, offset):
    """fp64. seed, offset: int64 scalars."""
    zero = tl.zeros((1,), tl.int32)
    low = zero.to(tl.uint32) + (offset & 0xFFFFFFFF).to(tl.uint32)
    high = zero.to(tl.uint32) + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, _c, _d = tl.philox(seed, zero, zero, low, high)
    bits = (a.to(tl.uint32).to(tl.int64) << 20) | (b.to(tl.uint32).to(tl.int64) >> 12)
    return (tl.max(bits, axis=0).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52
