"""Blocks of GGUF files read in place, by the same table as in `ggml`.

A block begins at an even byte, and at a multiple of four or more where its size is one: Triton sees it in the product
of a block's place and its size, and loads are as wide as that allows.
"""

import triton
import triton.language as tl
from triton import constexpr_function

from accel_kernels.gemm.blocks import ggml
from accel_kernels.gemm.blocks.block_places_triton import arange, block_places


@constexpr_function
def ggml_format(name):
    """The table's row. Not a name of this module's own, which Triton would compare at every launch."""
    return ggml.GGML[name]


@constexpr_function
def level_words():
    """IQ4_LEVELS, a byte each, in four words of 32 bits."""
    levels = bytes(level % 256 for level in ggml.IQ4_LEVELS)
    return tuple(int.from_bytes(levels[i : i + 4], "little", signed=True) for i in range(0, 16, 4))


@triton.jit
def unpack_ggml_blocks(weight, at, N: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr):
    """weight: pointer to uint8, even. at: of `block_places`. COMPUTE: float32, or float16 to round to it as libraries
    do. Returns (N, B * columns) float32; of blocks that are not there 0.
    """
    F: tl.constexpr = ggml_format(FORMAT)
    if F.low.bits == 8:
        numbers = _bytes(weight, at, N, B, F.bytes, F.low.first, F.columns, F.columns).to(tl.int32)
        values = _as_float(numbers ^ 128, 128)
    else:
        numbers = _packed(weight, at, N, B, F.bytes, F.columns, F.low.first, F.low.bits, F.low.run)
        if F.high is not None:
            high = _packed(weight, at, N, B, F.bytes, F.columns, F.high.first, F.high.bits, F.high.run)
            values = _as_float(numbers | high << F.low.bits, F.zero)
        elif F.levels:
            values = _level(numbers).to(tl.float32)
        else:
            values = (numbers - F.zero).to(tl.float32)
    block, mask = block_places(at, N, B)
    halves = weight.to(tl.pointer_type(tl.float16)) + block * (F.bytes // 2)
    scale = tl.load(halves + F.scale // 2, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if F.minimum is not None:
        minimum = tl.load(halves + F.minimum // 2, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if F.packing != "":
        factors, of_minimum = _scales(weight, at, N, B, FORMAT)
        scale = _rounded(scale * factors.to(tl.float32), COMPUTE)
        if F.minimum is not None:
            minimum = _rounded(minimum * of_minimum.to(tl.float32), COMPUTE)
    values = values.reshape(N, B, F.groups, F.columns // F.groups) * scale[:, :, :, None]
    if not F.levels:
        values = _rounded(values, COMPUTE)
    if F.minimum is not None:
        least = minimum[:, :, :, None]
        values = _rounded(values + least if F.packing == "" else values - least, COMPUTE)
    return values.reshape(N, B * F.columns)


@triton.jit
def _as_float(numbers, ZERO: tl.constexpr):
    """numbers - ZERO, as float32. The numbers, below 2 ** 23, are the lowest bits of a sum with that: an integer's own
    conversion has an eighth of the rate. Of 4 bits it is faster all the same.
    """
    return (numbers | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + ZERO)


@triton.jit
def _rounded(values, COMPUTE: tl.constexpr):
    return values.to(COMPUTE).to(tl.float32)


@triton.jit
def _bytes(weight, at, N: tl.constexpr, B: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
           COUNT: tl.constexpr, PERIOD: tl.constexpr):  # fmt: skip
    """COUNT of each block of SIZE from byte FIRST on, (N, B, COUNT) uint8; after PERIOD of them from FIRST again."""
    block, mask = block_places(at, N, B)
    place = FIRST + arange(COUNT) % PERIOD
    return tl.load(weight + (block * SIZE)[:, :, None] + place[None, None, :], mask=mask[:, :, None], other=0)


@triton.jit
def _packed(weight, at, N: tl.constexpr, B: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
            FIRST: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr):  # fmt: skip
    """The bits of every number, see `PackedBits`: (N, B, COLUMNS) int32."""
    COUNT: tl.constexpr = COLUMNS * BITS // 8
    held = _bytes(weight, at, N, B, SIZE, FIRST, COUNT, COUNT).to(tl.int32).reshape(N, B, COUNT // RUN, RUN)
    if BITS == 4:
        numbers = tl.join(held & 15, held >> 4)
    elif BITS == 2:
        even, odd = tl.join(held & 3, held >> 4 & 3), tl.join(held >> 2 & 3, held >> 6)
        numbers = tl.join(even, odd).reshape(N, B, COUNT // RUN, RUN, 4)
    else:
        first = tl.join(tl.join(held & 1, held >> 4 & 1), tl.join(held >> 2 & 1, held >> 6 & 1))
        second = tl.join(tl.join(held >> 1 & 1, held >> 5 & 1), tl.join(held >> 3 & 1, held >> 7))
        numbers = tl.join(first, second).reshape(N, B, COUNT // RUN, RUN, 8)
    return numbers.permute(0, 1, 2, 4, 3).reshape(N, B, COLUMNS)


@triton.jit
def _level(numbers):
    words: tl.constexpr = level_words()
    low = tl.where(numbers < 4, words[0], words[1])
    word = tl.where(numbers < 8, low, tl.where(numbers < 12, words[2], words[3]))
    return (word >> (numbers & 3) * 8).to(tl.int8)


@triton.jit
def _scales(weight, at, N: tl.constexpr, B: tl.constexpr, FORMAT: tl.constexpr):
    """Scales of the scale and of the minimum, (N, B, groups) int32, as `ggml` has them."""
    F: tl.constexpr = ggml_format(FORMAT)
    if F.packing == "bytes":
        factors = _bytes(weight, at, N, B, F.bytes, F.scales, 16, 16).to(tl.int8, bitcast=True).to(tl.int32)
        least = factors
    elif F.packing == "nibbles":
        held = _bytes(weight, at, N, B, F.bytes, F.scales, 16, 16).to(tl.int32)
        factors, least = held & 15, held >> 4
    elif F.packing == "sixes":
        place = arange(8)[None, None, :]
        block, mask = block_places(at, N, B)
        words = weight.to(tl.pointer_type(tl.int32)) + block * (F.bytes // 4) + F.scales // 4
        first = tl.load(words, mask=mask, other=0)[:, :, None] >> place % 4 * 8
        second = tl.load(words + 1, mask=mask, other=0)[:, :, None] >> place % 4 * 8
        rest = tl.load(words + 2, mask=mask, other=0)[:, :, None] >> place % 4 * 8
        factors = tl.where(place < 4, first & 63, rest & 15 | first >> 2 & 48)
        least = tl.where(place < 4, second & 63, rest >> 4 & 15 | second >> 2 & 48)
    elif F.packing == "planes":
        place = arange(16)[None, None, :]
        low = _bytes(weight, at, N, B, F.bytes, F.scales, 16, 8).to(tl.int32) >> place // 8 * 4 & 15
        high = _bytes(weight, at, N, B, F.bytes, F.scales + 8, 16, 4).to(tl.int32) >> place // 4 * 2 & 3
        factors = (low | high << 4) - 32
        least = factors
    else:
        place = arange(8)[None, None, :]
        block, mask = block_places(at, N, B)
        high = tl.load(
            weight.to(tl.pointer_type(tl.int16)) + block * (F.bytes // 2) + F.scales // 2, mask=mask, other=0
        )
        low = tl.load(
            weight.to(tl.pointer_type(tl.int32)) + block * (F.bytes // 4) + F.scales // 4 + 1, mask=mask, other=0
        )
        factors = low[:, :, None] >> place * 4 & 15 | (high.to(tl.int32)[:, :, None] >> place * 2 & 3) << 4
        factors -= 32
        least = factors
    return factors, least
