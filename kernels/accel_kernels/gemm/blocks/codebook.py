"""4-bit places in a table of 16 numbers, times a scale: NF4 and FP4 as bitsandbytes has them (Dettmers et al., "QLoRA:
Efficient finetuning of quantized LLMs", 2023). The scales may be in 8 bits themselves, with scales of their own.
"""

from typing import NamedTuple

import torch

from accel_kernels.gemm.blocks.block_weight import BlockFormat, BlockWeight

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


def codebook_values(weight: BlockWeight, data: torch.Tensor) -> torch.Tensor:
    """The unpacker of both: (..., 16) uint8 -> (..., 32), all pieces of the weight."""
    pieces = data.reshape(-1, PIECE // 2)
    side = Codebook(*weight.side)
    numbers = side.code[torch.stack([pieces >> 4, pieces & 15], 2).int()]
    values = numbers * side.scales(len(pieces))[:, None, None]
    return values.reshape(*data.shape[:-1], PIECE)


CODEBOOKS = {name: BlockFormat(name, PIECE, PIECE // 2, codebook_values, source="table") for name in ("nf4", "fp4")}
