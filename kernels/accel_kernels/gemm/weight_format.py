"""How the numbers of a weight in fewer bits lie in memory, and what serves products with them: a value for each format.

To add one, write its `pack` and `unpack`, and add it to FORMATS: the weight is then written out before each product.
Where kernels are to read it as it lies, `unpacking_triton` unpacks it there, and `most_rows` says for how many rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

PER_WORD = 8  # 4-bit numbers to an int32
ZERO_POINT = 8  # what a 4-bit number is stored above itself: -8..7 as 0..15
# Rows of x up to which a product reads the numbers as they lie. To write a weight of 8 bits out for cuBLAS, and read it
# there, moves five times its bytes; of more rows, multiplying takes longer than that.
MOST_QUANTIZED_ROWS = 512


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """(N, K) of -8..7 as int32 (N, K / 8). Raises ValueError where K is not a multiple of 8."""
    if numbers.shape[1] % PER_WORD:
        raise ValueError(f"{numbers.shape[1]} columns: 4-bit numbers are packed by {PER_WORD}")
    pairs = numbers.add(ZERO_POINT).to(torch.uint8).unflatten(1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)  # the lowest first, as in `unpack`


def unpack(words: torch.Tensor) -> torch.Tensor:
    """(N, K) int8 of -8..7 from int32 (N, K / 8)."""
    pairs = words.contiguous().view(torch.uint8)  # the lowest first, as every machine that torch runs on has them
    numbers = torch.empty((*pairs.shape, 2), dtype=torch.uint8, device=words.device)  # both halves are written in place
    torch.bitwise_and(pairs, 15, out=numbers[..., 0])
    torch.bitwise_right_shift(pairs, 4, out=numbers[..., 1])
    return numbers.view(torch.int8).sub_(ZERO_POINT).flatten(1)


def unchanged(numbers: torch.Tensor) -> torch.Tensor:
    """As it is: a number to each stored element."""
    return numbers


@dataclass(frozen=True)
class WeightFormat:
    """One way to store numbers.

    name: what schemes call it, and what kernels are compiled for. dtype: of the stored elements. bits: of a number.
    largest: the largest number. pack, unpack: numbers (N, K) to stored elements (N, ..) and back. most_rows: rows of x
    up to which kernels read it as it lies; 0: none does.
    """

    name: str
    dtype: torch.dtype
    bits: int
    largest: float
    pack: Callable[[torch.Tensor], torch.Tensor] = unchanged
    unpack: Callable[[torch.Tensor], torch.Tensor] = unchanged
    most_rows: int = MOST_QUANTIZED_ROWS

    @property
    def per_element(self) -> int:
        """Numbers to a stored element."""
        return 8 * self.dtype.itemsize // self.bits

    def range(self, symmetric: bool = True) -> tuple[float, float]:
        """Least and largest number; those of whole numbers reach one further down where 0 does not stand for 0."""
        return -self.largest - (not symmetric and not self.dtype.is_floating_point), self.largest

    def nearest(self, steps: torch.Tensor, symmetric: bool = True) -> torch.Tensor:
        """The numbers nearest to these floats, int8 or float8."""
        low, high = self.range(symmetric)
        if self.dtype.is_floating_point:
            return steps.clamp(low, high).to(self.dtype)
        return steps.round().clamp(low, high).to(torch.int8)


INT8 = WeightFormat("int8", torch.int8, 8, 127)
INT4 = WeightFormat("int4", torch.int32, 4, 7, pack, unpack)
FP8 = WeightFormat("fp8", torch.float8_e4m3fn, 8, torch.finfo(torch.float8_e4m3fn).max)
FORMATS = {format.name: format for format in (INT8, INT4, FP8)}
BY_DTYPE = {format.dtype: format for format in (INT8, INT4, FP8)}  # those that their elements tell apart
