"""4-bit places in a table of 16 numbers, times a scale: NF4 and FP4 as bitsandbytes has them (Dettmers et al., "QLoRA:
Efficient finetuning of quantized LLMs", 2023). The scales may be in 8 bits themselves, with scales of their own.
"""

from typing import NamedTuple

import torch

from accel_kernels.gemm.blocks.block_weight import BlockWeight
from accel_kernels.gemm.quantized_weight import WeightFormat

PIECE = 32  # numbers that a thread reads at a time, in 16 bytes; a scale covers one or more
NESTED = 256  # scales to one of theirs


class Codebook(NamedTuple):
    """What lies beside the places, of which the first of two is in a byte's upper half.

    code: (16,) float32, what places stand for. absmax: the scales of whole powers of two of pieces, one after the other
    through all rows, float32; or uint8, places in code2 (256,) times absmax2 plus offset, all float32. shift: the
    logarithm of how many pieces a scale covers.
    """

    code: torch.Tensor
    absmax: torch.Tensor
    shift: int
    code2: torch.Tensor | None = None
    absmax2: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def scales(self, pieces: int) -> torch.Tensor:
        """(pieces,): a scale for each."""
        absmax = self.absmax
        if self.code2 is not None and self.absmax2 is not None and self.offset is not None:
            absmax = self.code2[absmax.int()] * self.absmax2.repeat_interleave(NESTED)[: len(absmax)] + self.offset
        return absmax.repeat_interleave(1 << self.shift)[:pieces]


def codebook_values(weight: BlockWeight) -> torch.Tensor:
    """The unpacker of both."""
    pieces = weight.blocks
    side = Codebook(*weight.side)
    numbers = side.code[torch.stack([pieces >> 4, pieces & 15], 2).int()]
    return numbers * side.scales(len(pieces))[:, None, None]


CODEBOOKS = {name: WeightFormat(name, PIECE, PIECE // 2, codebook_values, source="table") for name in ("nf4", "fp4")}


def codebook_case(full: torch.Tensor, name: str, size: int = 64, nested: bool = False) -> BlockWeight:
    """Any weight in the shape of `full`, about as large; size: numbers to a scale."""
    device, shift = full.device, (size // PIECE).bit_length() - 1
    data = (full * 1e4).int().bitwise_and(255).to(torch.uint8)[:, ::2].contiguous()
    scales = -(-full.numel() // size)
    absmax = full.flatten()[:scales].abs().float() + full.shape[1] ** -0.5
    code = torch.linspace(-1, 1, 16, device=device)
    if not nested:
        return BlockWeight(data, full.shape[1], CODEBOOKS[name], side=Codebook(code, absmax, shift))
    outer = absmax[: -(-scales // NESTED)].contiguous()
    places, code2 = (absmax * 1e4).int().bitwise_and(255).to(torch.uint8), torch.linspace(-1, 1, 256, device=device)
    side = Codebook(code, places, shift, code2, outer, 2 * absmax[0])
    return BlockWeight(data, full.shape[1], CODEBOOKS[name], side=side)
