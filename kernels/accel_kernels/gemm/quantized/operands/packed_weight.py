"""A quantized weight as kernels take it: its numbers as 32-bit words, with scales and zeros in one argument."""

from typing import NamedTuple

import torch

from accel_kernels.gemm.quantized_weight import Quantized


class PackedWeight(NamedTuple):
    """words: int32 (N, K / 4), of 4-bit numbers (N, K / 8); scales, zeros: as of `Quantized`. None: no such weight."""

    words: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: Quantized | None) -> "PackedWeight":
        return cls() if weight is None else cls(weight.data.view(torch.int32), weight.scales, weight.zeros)
