"""The noise of `noise.py` inside kernels; the same words bit for bit."""

import triton
import triton.language as tl

from accel_kernels.sampling import noise

LARGEST = tl.constexpr(noise.LARGEST)
SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)


@triton.jit
def philox_words(seed, offset, counter):
    """Four words of 32 bits for each counter. seed, offset: int64 scalars; counter: an int32 block."""
    zeros = counter * 0
    low = zeros.to(tl.uint32) + (offset & 0xFFFFFFFF).to(tl.uint32)
    high = zeros.to(tl.uint32) + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, counter, zeros, low, high)
    return a, b, c, d


@triton.jit
def gumbel_of(words):
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, LARGEST)  # 2**-32
    series = v * (1.0 + v * (0.5 + v * (1 / 3 + v * (0.25 + v * (0.2 + v * (1 / 6))))))
    return -tl.log(tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v)))


@triton.jit
def noise_from(seed, offset, first, SIZE: tl.constexpr):
    """Of SIZE places from `first` on, a multiple of 4: each counter serves four of them."""
    a, b, c, d = philox_words(seed, offset, first // 4 + tl.arange(0, SIZE // 4))
    return gumbel_of(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def noise_at(seed, offset, place):
    """Of any places, an int32 block."""
    a, b, c, d = philox_words(seed, offset, place // 4)
    which = place % 4
    return gumbel_of(tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d)))
