"""A matrix in fewer bits: whole numbers with scales, by row or by groups of columns; and how numbers lie in memory.

w[n, k] = (number[n, k] - zeros[n, g]) * scales[n, g], g = k // group. The arrangement in memory is that of compressed
tensors on disk (the formats "int-quantized", "pack-quantized" and "float-quantized" of the package compressed-tensors),
so what was saved is what kernels read. Only the zero points of 4-bit numbers, and 8-bit integers that meet activations
in 16 bits, are packed into words there; here they are a byte each.

To add a format, write its `pack` and `unpack` here: the weight is then written out before each product. Where kernels
are to read it as it lies, `unpacking_triton` unpacks it there, and `most_rows` says for how many rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel_kernels.device import float8_reason

PER_WORD = 8  # 4-bit numbers to an int32
ZERO_POINT = 8  # what a 4-bit number is stored above itself: -8..7 as 0..15
# Rows of x up to which a product reads the numbers as they lie. To write a weight of 8 bits out for cuBLAS, and read it
# there, moves five times its bytes; of more rows, multiplying takes longer than that.
MOST_QUANTIZED_ROWS = 512


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """(N, K) of -8..7 as int32 (N, K / 8). Raises ValueError where K is not a multiple of 8."""
    if numbers.shape[1] % PER_WORD:
        raise ValueError(f"{numbers.shape[1]} columns: 4-bit numbers are packed by {PER_WORD}")
    pairs = numbers.to(torch.int8).add(ZERO_POINT).view(torch.uint8).unflatten(1, (-1, 2))
    words = (pairs[..., 1] << 4).bitwise_or_(pairs[..., 0])  # the lowest first, as in `unpack`
    return words.contiguous().view(torch.int32)


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
    up to which kernels read it as it lies; 0: none does. exact: a dtype that holds every number exactly.
    """

    name: str
    dtype: torch.dtype
    bits: int
    largest: float
    pack: Callable[[torch.Tensor], torch.Tensor] = unchanged
    unpack: Callable[[torch.Tensor], torch.Tensor] = unchanged
    most_rows: int = MOST_QUANTIZED_ROWS
    exact: torch.dtype = torch.float16

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
FP8 = WeightFormat("fp8", torch.float8_e4m3fn, 8, 448)  # no call of torch: files of kernels are read without it
FORMATS = {format.name: format for format in (INT8, INT4, FP8)}
BY_DTYPE = {format.dtype: format for format in (INT8, INT4, FP8)}  # those that their elements tell apart

QUAD = 16  # bytes of the weight that a thread reads at a time; a scale covers whole ones
PARTS = ("data", "scales", "zeros")  # the tensors of a weight


class Quantized(NamedTuple):
    """A weight (N, K).

    data: stored elements (N, K / per_element of the format): int8, float8_e4m3fn, or int32 of eight 4-bit numbers each,
    the first in the lowest bits, stored plus 8. scales: (N, K / group), in the dtype of the model or float32. zeros:
    (N, K / group) int8: the numbers that stand for 0, or None where 0 does. format: how numbers lie in data.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat

    @classmethod
    def of(cls, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> "Quantized":
        """In the format that the dtype of data tells."""
        return cls(data, scales, zeros, BY_DTYPE[data.dtype])

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.data.shape
        return rows, columns * self.format.per_element

    @property
    def group(self) -> int:
        """Columns to a scale; all of them where scales are by row."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors there are, by name."""
        return {name: part for name, part in zip(PARTS, self, strict=False) if isinstance(part, torch.Tensor)}

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Quantized":
        """The same of change(part) for every part there is."""
        zeros = None if self.zeros is None else change(self.zeros)
        return Quantized(change(self.data), change(self.scales), zeros, self.format)

    def rows(self, start: int, end: int) -> "Quantized":
        """Some rows of it, as views."""
        return self.each(lambda part: part[start:end])

    def reads(self, rows: int) -> bool:
        """Whether kernels read it as it lies for so many rows of x; else it is written out before the product."""
        return rows <= self.format.most_rows

    def numbers(self) -> torch.Tensor:
        """(N, K) int8, or float8 as it is."""
        return self.format.unpack(self.data)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, K) in this dtype, rounded once, from float32."""
        numbers = self.numbers().float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        return (numbers * self.scales.float()[:, :, None]).flatten(1).to(dtype)


class PackedWeight(NamedTuple):
    """A weight as kernels take it, its numbers as 32-bit words with scales and zeros in one argument.

    words: int32 (N, K / 4), of 4-bit numbers (N, K / 8); scales, zeros: as of `Quantized`. None: no such weight.
    """

    words: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: Quantized | None) -> "PackedWeight":
        return cls() if weight is None else cls(weight.data.view(torch.int32), weight.scales, weight.zeros)


def weight_reason(weight: Quantized) -> str | None:
    """Why kernels cannot read this weight."""
    if not weight.format.most_rows:
        return f"no kernel reads {weight.format.name}"
    quad = QUAD * 8 // weight.format.bits
    if weight.scales.shape[1] > 1 and (weight.shape[1] % weight.scales.shape[1] or weight.group % quad):
        return f"a scale to {weight.group} columns, not a multiple of {quad}"
    for name, tensor in weight.parts().items():
        if not tensor.is_contiguous():
            return f"{name} of the weight not contiguous"
    if weight.data.data_ptr() % 4:
        return "a weight not at a multiple of 4 bytes"
    if weight.format == FP8 and weight.zeros is not None:
        return "float8 with zeros"
    return float8_reason(weight.data.device, weight.data.dtype)


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype, group: int = 0, zeros: bool = False) -> Quantized:
    """The nearest numbers to weight (N, K), by rows or by groups of columns; scales in the weight's dtype.

    dtype: int8, int32 (4 bits) or float8_e4m3fn. group: columns to a scale, 0 for all. zeros: numbers from the least to
    the greatest value rather than evenly around 0.
    """
    format = BY_DTYPE[dtype]
    values = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    least, most = format.range(symmetric=False)
    middle = None
    if zeros:
        low, high = values.amin(2, keepdim=True).clamp_max(0), values.amax(2, keepdim=True).clamp_min(0)
        scales = ((high - low) / (most - least)).clamp_min(1e-12).to(weight.dtype)
        middle = (least - low / scales.float()).round().clamp(least, most)
    else:
        scales = (values.abs().amax(2, keepdim=True) / most).clamp_min(1e-12).to(weight.dtype)
    steps = values / scales.float()
    numbers = format.nearest(steps if middle is None else steps + middle, symmetric=False).flatten(1)
    zero = None if middle is None else middle[..., 0].to(torch.int8)
    return Quantized(format.pack(numbers), scales[..., 0].contiguous(), zero, format)
