"""What a layer keeps for a token, and how many tokens a block holds."""

from typing import NamedTuple

import torch

BLOCK = 64  # tokens
SCALE = torch.float32


class Shape(NamedTuple):
    """What one layer keeps for a token: keys and values of (heads, dim) each.

    dtype: of what goes in and comes out. kv_dtype: the 8-bit dtype in which they are stored, with a float32 scale for
    each token and head, see `accel_kernels.attention.paged.kv_quantization`; None: they are stored as they are.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None

    @property
    def size(self) -> int:
        """Bytes a token."""
        stored = self.dtype if self.kv_dtype is None else self.kv_dtype
        scale = 0 if self.kv_dtype is None else SCALE.itemsize
        return 2 * self.heads * (self.dim * stored.itemsize + scale)

    @property
    def exact(self) -> "Shape":
        """The same without rounding."""
        return self._replace(kv_dtype=None)

    def empty(self, layers: int, blocks: int) -> tuple[torch.Tensor, ...]:
        """Room for keys and values, (layers, 2, blocks, BLOCK, heads, dim); and, where they are rounded, their scales,
        (layers, 2, blocks, BLOCK, heads), the tokens of a block and head next to each other in memory.
        """
        stored = self.kv_dtype or self.dtype
        kept = torch.empty(layers, 2, blocks, BLOCK, self.heads, self.dim, dtype=stored, device=self.device)
        if self.kv_dtype is None:
            return (kept,)
        return kept, torch.empty(layers, 2, blocks, self.heads, BLOCK, dtype=SCALE, device=self.device).mT


class StateShape(NamedTuple):
    """What one layer keeps for a row."""

    state: tuple[int, ...] | None
    window: tuple[int, int] | None
    dtype: torch.dtype
    device: torch.device
