"""The blocks of GGUF files: numbers of few bits, scales of 16 bits, and in blocks of 256 scales of the scales.

A block is a table's row: `GgmlFormat` says at which bytes everything lies, and one unpacker here and one in
`ggml_triton` read all of them. Where a library computes in float16 it rounds each scale, product and sum to that;
numbers of a table of levels are float32 there too, as diffusers has them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.quantized_weight import WeightFormat

# What a number of 4 bits stands for in IQ4_NL and IQ4_XS.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class PackedBits(NamedTuple):
    """Where some bits of every number lie: from byte `first` on, the lowest for the first of numbers.

    bits: of a number, 1, 2, 4 or 8. run: bytes, one after the other, whose lowest bits are numbers one after the other;
    their next bits are the next numbers.
    """

    first: int
    bits: int
    run: int


@dataclass(frozen=True)
class GgmlFormat(WeightFormat):
    """One of ggml's types, its number there is `code`; byte `scale` begins a float16.

    minimum: the byte of another, added to numbers times scale; where there are scales of scales, taken off. zero: what
    is taken off a number. high: of the bits above `low`. groups: how many scales of the scale, in the form of the name
    `packing` from byte `scales` on. levels: whether numbers are places in IQ4_LEVELS.
    """

    code: int
    scale: int
    low: PackedBits
    high: PackedBits | None = None
    minimum: int | None = None
    zero: int = 0
    groups: int = 1
    packing: str = ""
    scales: int = 0
    levels: bool = False


def unpack_ggml(weight: BlockWeight) -> torch.Tensor:
    """Of all of them, in the weight's `compute`, of IQ4_LEVELS in float32."""
    format, blocks = weight.format, weight.blocks
    assert isinstance(format, GgmlFormat)
    if format.low.bits == 8:
        numbers = blocks[:, format.low.first :].view(torch.int8)
    else:
        numbers = _bits(blocks, format.low, format.columns)
        if format.high is not None:
            numbers = numbers | _bits(blocks, format.high, format.columns) << format.low.bits
        numbers = numbers.to(torch.int8) - format.zero
    scale = _half(blocks, format.scale, weight.compute)
    minimum = None if format.minimum is None else _half(blocks, format.minimum, weight.compute)
    if format.packing:
        factors, least = _scales(blocks, format)
        scale = scale * factors
        minimum = None if minimum is None else -(minimum * least)
    if format.levels:
        numbers = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=blocks.device)[numbers.long()]
    values = scale[..., None] * numbers.reshape(len(blocks), format.groups, -1)
    return values if minimum is None else values + minimum[..., None]


def unpack_bfloat16(weight: BlockWeight) -> torch.Tensor:
    """Of BF16, which no kernel reads: it is no smaller than what it is written out as."""
    return weight.data.view(torch.bfloat16).to(weight.compute)


def _half(blocks: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
    return blocks[:, first : first + 2].view(torch.float16).to(dtype)


def _bits(blocks: torch.Tensor, field: PackedBits, columns: int) -> torch.Tensor:
    held = blocks[:, field.first : field.first + columns * field.bits // 8]
    shifts = torch.arange(0, 8, field.bits, dtype=torch.uint8, device=blocks.device)[:, None]
    numbers = held.reshape(len(blocks), -1, 1, field.run) >> shifts & (1 << field.bits) - 1
    return numbers.reshape(len(blocks), columns)


def _scales(blocks: torch.Tensor, format: GgmlFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of the scale and of the minimum, (blocks, groups) each; where there is no minimum they are no matter."""
    held = blocks[:, format.scales :]
    if format.packing == "bytes":
        factors = held[:, :16].view(torch.int8)
        return factors, factors
    if format.packing == "nibbles":
        return held[:, :16] & 15, held[:, :16] >> 4
    if format.packing == "sixes":  # four scales, four minima, and the rest of both in the bits that are left
        first, second, rest = held[:, :4], held[:, 4:8], held[:, 8:12]
        factors = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 1)
        return factors, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 1)
    if format.packing == "planes":
        low, high = _bits(held, PackedBits(0, 4, 8), 16), _bits(held, PackedBits(8, 2, 4), 16)
    else:
        high, low = _bits(held, PackedBits(0, 2, 1), 8), _bits(held, PackedBits(2, 4, 1), 8)
    factors = (low | high << 4).to(torch.int8) - 32
    return factors, factors


def _format(name: str, columns: int, bytes: int, code: int, scale: int, low: PackedBits, *more, **named) -> GgmlFormat:
    return GgmlFormat(name, columns, bytes, unpack_ggml, code, scale, low, *more, **named)


GGML = {
    format.name: format
    for format in (
        _format("Q4_0", 32, 18, 2, 0, PackedBits(2, 4, 16), zero=8),
        _format("Q4_1", 32, 20, 3, 0, PackedBits(4, 4, 16), minimum=2),
        _format("Q5_0", 32, 22, 6, 0, PackedBits(6, 4, 16), PackedBits(2, 1, 1), zero=16),
        _format("Q5_1", 32, 24, 7, 0, PackedBits(8, 4, 16), PackedBits(4, 1, 1), minimum=2),
        _format("Q8_0", 32, 34, 8, 0, PackedBits(2, 8, 32), source="bytes"),
        _format("Q2_K", 256, 84, 10, 80, PackedBits(16, 2, 32), None, 82, 0, 16, "nibbles", 0),
        _format("Q3_K", 256, 110, 11, 108, PackedBits(32, 2, 32), PackedBits(0, 1, 32), None, 4, 16, "planes", 96),
        _format("Q4_K", 256, 144, 12, 0, PackedBits(16, 4, 32), None, 2, 0, 8, "sixes", 4, source="runs"),
        _format("Q5_K", 256, 176, 13, 0, PackedBits(48, 4, 32), PackedBits(16, 1, 32), 2, 0, 8, "sixes", 4),
        _format(
            "Q6_K",
            256,
            210,
            14,
            208,
            PackedBits(0, 4, 64),
            PackedBits(128, 2, 32),
            None,
            32,
            16,
            "bytes",
            192,
            source="sixes",
        ),
        _format("IQ4_NL", 32, 18, 20, 0, PackedBits(2, 4, 16), levels=True),
        _format("IQ4_XS", 256, 136, 23, 0, PackedBits(8, 4, 16), None, None, 0, 8, "words", 2, True),
    )
}
BF16 = WeightFormat("BF16", 1, 2, unpack_bfloat16, most_rows=0)


def ggml_case(full: torch.Tensor, name: str, compute: torch.dtype = torch.float32) -> BlockWeight:
    """Any weight in the shape of `full`; scales of 16 bits are small, so that no value is far from 0."""
    format, k = GGML[name], full.shape[1]
    row = k // format.columns * format.bytes
    data = (full.repeat(1, 2)[:, :row] * 1e4).int().bitwise_and(255).to(torch.uint8).contiguous()
    for first in (format.scale, format.minimum):
        if first is not None:
            data.view(-1, format.bytes)[:, first + 1] &= 0x0F
    return BlockWeight(data, k, format, compute)
