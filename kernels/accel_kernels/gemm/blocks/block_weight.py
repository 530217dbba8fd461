"""A matrix as a library stores it: rows of blocks, each of so many numbers, in bytes that stay as they came.

Its `WeightFormat` says what the bytes of a block mean: `unpack` in torch, which gives the library's own values bit for
bit, and `unpacking_triton` names a function of kernels that reads them in place. To add a format, write both.
"""

from typing import Any, NamedTuple

import torch

from accel_kernels.gemm.quantized_weight import MOST_UNPACKED_ROWS, WeightFormat


class BlockWeight(NamedTuple):
    """A weight (N, K), K a multiple of the block's columns.

    data: uint8, contiguous, N * K / columns blocks, row after row; of any shape. columns: K.
    compute: the dtype in which the library computes a value before it rounds it to the dtype of a product: float32, or
    float16 where its arithmetic is in that. side: tensors that lie beside the bytes, as a format's own words say.
    """

    data: torch.Tensor
    columns: int
    format: WeightFormat
    compute: torch.dtype = torch.float32
    side: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        blocks = self.data.numel() // self.format.bytes
        return blocks * self.format.columns // self.columns, self.columns

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def blocks(self) -> torch.Tensor:
        """(blocks, bytes)."""
        return self.data.reshape(-1, self.format.bytes)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + sum(one.nbytes for one in self.side if isinstance(one, torch.Tensor))

    @property
    def kind(self) -> tuple:
        """Equal for weights that one operation can take, as gate and up."""
        beside = (one.dtype if isinstance(one, torch.Tensor) else one for one in self.side)
        return self.format, self.compute, self.shape, self.data.device, *beside

    def first(self, rows: int) -> "BlockWeight":
        """The first rows of it, in the same memory."""
        size = rows * self.columns // self.format.columns * self.format.bytes
        return self._replace(data=self.data.reshape(-1)[:size])

    @property
    def most_rows(self) -> int:
        """As of `Quantized`."""
        return MOST_UNPACKED_ROWS if self.format.most_rows else 0

    def reason(self) -> str | None:
        """Why kernels cannot read this weight."""
        if self.data.numel() == 0:
            return "empty"
        if not self.format.most_rows:
            return f"no kernel reads {self.format.name}"
        if self.columns % self.format.columns:
            return f"{self.columns} columns, not a multiple of {self.format.columns}"
        tensors = [self.data, *(one for one in self.side if isinstance(one, torch.Tensor))]
        if not all(tensor.is_contiguous() and tensor.device == self.data.device for tensor in tensors):
            return "a weight not contiguous, or on several devices"
        if self.data.data_ptr() % 4:
            return "a weight not at a multiple of 4 bytes"
        return None

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, K) in this dtype: the values in `compute`, rounded once more."""
        return self.format.unpack(self).reshape(self.shape).to(dtype)


class BlockArguments(NamedTuple):
    """A weight as kernels take it. None: no such weight."""

    data: torch.Tensor | None = None
    side: tuple[Any, ...] = ()

    @classmethod
    def of(cls, weight: BlockWeight | None) -> "BlockArguments":
        return cls() if weight is None else cls(weight.data, weight.side)
