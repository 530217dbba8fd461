"""Random blocks of GGUF's formats."""

import torch
from accel_kernels.gemm.blocks.ggml import GgmlFormat


def random_blocks(format: GgmlFormat, count: int, seed: int = 0, spread: float = 0.1) -> torch.Tensor:
    """(count, bytes) uint8: random bytes, but for the scales in 16 bits, which are finite and about `spread`."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count, format.bytes), generator=g, dtype=torch.uint8)
    for first in (format.scale, format.minimum):
        if first is not None:
            data[:, first : first + 2] = (torch.randn(count, 1, generator=g) * spread).half().view(torch.uint8)
    return data
