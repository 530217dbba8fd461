"""Whole bytes: numbers of 8 bits times scales that rows and columns share, and bfloat16 as it is."""

from typing import NamedTuple

import torch

from accel_kernels.gemm.blocks.block_weight import BlockFormat, BlockWeight
from accel_kernels.gemm.quantized_weight import Quantized

PIECE = 32  # numbers that a thread reads at a time
ALL = 31  # the logarithm of more rows, or pieces, than there are


class Bytewise(NamedTuple):
    """What lies beside numbers of 8 bits: float8 (e4m3), or int8 less `zeros`.

    scales: (rows, across) of scales, row after row; floats, or the exponents of powers of two (e8m0) as uint8. zeros:
    int8 of that shape, or None. pieces: of a row of the weight, 32 numbers each. tall, wide: the logarithms of how many
    rows and pieces share a scale; ALL where all do.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    pieces: int
    tall: int
    wide: int
    across: int

    @classmethod
    def of(
        cls, scales: torch.Tensor, zeros: torch.Tensor | None, shape: tuple[int, int], block: tuple[int, int]
    ) -> "Bytewise":
        """Of a weight of this shape, with a scale to each block of so many rows and columns. Raises ValueError for
        blocks that are no powers of two, or of no whole pieces.
        """
        if shape[1] % PIECE:
            raise ValueError(f"rows of {shape[1]} numbers, not a multiple of {PIECE}")
        tall, wide = (_logarithm(*sizes) for sizes in zip(block, shape, (1, PIECE), strict=True))
        return cls(scales, zeros, shape[1] // PIECE, tall, wide, -(-shape[1] // block[1]))

    def of_pieces(self, beside: torch.Tensor, count: int) -> torch.Tensor:
        """(count, 1) float32: what is beside, for each of the first pieces of the weight."""
        piece = torch.arange(count, device=beside.device)
        at = (piece // self.pieces >> self.tall) * self.across + (piece % self.pieces >> self.wide)
        beside = beside.view(torch.float8_e8m0fnu) if beside.dtype == torch.uint8 else beside
        return beside.reshape(-1).float()[at, None]


def _logarithm(size: int, whole: int, unit: int) -> int:
    """Of how many units share a scale: ALL for the whole."""
    shift = max(0, (size // unit).bit_length() - 1)
    if size < whole and unit << shift != size:
        raise ValueError(f"blocks of {size} numbers, not {unit} times a power of two")
    return ALL if size >= whole else shift


def unpack_bytewise(weight: BlockWeight, data: torch.Tensor) -> torch.Tensor:
    """(..., 32) uint8 -> (..., 32), all pieces of the weight."""
    kind = torch.float8_e4m3fn if weight.format.name == "fp8" else torch.int8
    side, numbers = Bytewise(*weight.side), data.reshape(-1, PIECE).view(kind).float()
    if side.zeros is not None:
        numbers = numbers - side.of_pieces(side.zeros, len(numbers))
    return (numbers * side.of_pieces(side.scales, len(numbers))).reshape(data.shape)


def quantized_of(weight: BlockWeight) -> Quantized | None:
    """The same numbers with scales by row and group of columns, written out for this one use; None where groups are not
    of one size, or these are no numbers of 8 bits.
    """
    if not isinstance(weight.side, Bytewise):
        return None
    side, (rows, columns) = weight.side, weight.shape
    if side.wide != ALL and columns % (PIECE << side.wide):
        return None
    beside: list[torch.Tensor | None] = []
    for one in (side.scales, side.zeros):
        if one is not None:
            one = one.view(torch.float8_e8m0fnu).float() if one.dtype == torch.uint8 else one
            one = one.reshape(-1, side.across)
            tall = rows if side.tall == ALL else 1 << side.tall
            one = (
                one if tall == 1 else one.repeat_interleave(tall, 0, output_size=len(one) * tall)[:rows]
            ).contiguous()
        beside.append(one)
    kind = torch.float8_e4m3fn if weight.format.name == "fp8" else torch.int8
    return Quantized.of(weight.data.view(kind).view(rows, columns), *beside)


def unpack_bfloat16(weight: BlockWeight, data: torch.Tensor) -> torch.Tensor:
    """(..., 64) uint8 -> (..., 32)."""
    return data.view(torch.bfloat16).to(weight.compute)


FP8 = BlockFormat("fp8", PIECE, PIECE, unpack_bytewise)
INT8 = BlockFormat("int8", PIECE, PIECE, unpack_bytewise)
BF16 = BlockFormat("BF16", PIECE, 2 * PIECE, unpack_bfloat16)
