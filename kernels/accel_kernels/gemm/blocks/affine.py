"""4-bit numbers -8 .. 7 by groups of columns, each with a scale and what is added, as torchao's plain int4."""

from typing import NamedTuple

import torch

from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.blocks.codebook import PIECE
from accel_kernels.gemm.quantized_weight import WeightFormat


class Affine(NamedTuple):
    """What lies beside the numbers, of which the first of two is in a byte's lower half.

    scale, zero: (groups, rows), of a floating dtype. row, group: how many pieces of 32 columns a row has, and a group.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    rows: int
    row: int
    group: int


def affine_values(weight: BlockWeight) -> torch.Tensor:
    """The unpacker, in float32: number times scale plus zero."""
    side, rows = Affine(*weight.side), weight.shape[0]
    numbers = torch.stack([weight.data & 15, weight.data >> 4], -1).view(torch.int8) ^ 8
    groups = (numbers - 8).view(rows, -1, side.group * PIECE)
    scale, zero = (one[:, :rows].t().float()[..., None] for one in (side.scale, side.zero))
    return groups * scale + zero


# How kernels read them differs where a scale covers an odd number of pieces.
INT4_AFFINE = tuple(
    WeightFormat("int4-affine", PIECE, PIECE // 2, affine_values, source=source) for source in ("affine", "affine-32")
)


def affine_weight(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, columns: int, group: int) -> BlockWeight:
    """data: (N, columns / 2) uint8. group: columns to a scale, a multiple of 32."""
    side = Affine(scale, zero, len(data), columns // PIECE, group // PIECE)
    return BlockWeight(data, columns, INT4_AFFINE[side.group % 2], side=side)


def affine_case(full: torch.Tensor, group: int = 32) -> BlockWeight:
    """Any weight in the shape of `full`, about as large; group: columns to a scale."""
    data = (full * 1e4).int().bitwise_and(255).to(torch.uint8)[:, ::2].contiguous()
    scale = full[:, ::group].t().abs().contiguous() / 8
    return affine_weight(data, scale, -scale, full.shape[1], group)
