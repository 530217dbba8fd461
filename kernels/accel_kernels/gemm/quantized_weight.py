"""A matrix in fewer bits: whole numbers with scales, by row or by groups of columns.

w[n, k] = (number[n, k] - zeros[n, g]) * scales[n, g], g = k // group. The arrangement in memory is that of compressed
tensors on disk (the formats "int-quantized", "pack-quantized" and "float-quantized" of the package compressed-tensors),
so what was saved is what kernels read. Only the zero points of 4-bit numbers, and 8-bit integers that meet activations
in 16 bits, are packed into words there; here they are a byte each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from accel_kernels.device import float8_reason

PER_WORD = 8  # 4-bit numbers to an int32
ZERO_POINT = 8  # what a 4-bit number is stored above itself: -8..7 as 0..15
QUAD = 16  # bytes of the weight that a thread reads at a time; a scale covers whole ones
# Rows of x up to which a product reads the numbers as they lie. To write a weight of 8 bits out for cuBLAS, and read it
# there, moves five times its bytes; of more rows, multiplying takes longer than that.
MOST_QUANTIZED_ROWS = 512
BITS = {torch.int8: 8, torch.int32: 4, torch.float8_e4m3fn: 8}


class Quantized(NamedTuple):
    """A weight (N, K).

    data: int8 (N, K); or int32 (N, K / 8), eight 4-bit numbers each, the first in the lowest bits, stored plus 8; or
    float8_e4m3fn (N, K). scales: (N, K / group), in the dtype of the model or float32. zeros: (N, K / group) int8: the
    numbers that stand for 0, or None where 0 does.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return BITS[self.data.dtype]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.data.shape
        return rows, columns * PER_WORD if self.data.dtype == torch.int32 else columns

    @property
    def group(self) -> int:
        """Columns to a scale; all of them where scales are by row."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Quantized":
        """The same of change(part) for every part there is."""
        return Quantized(change(self.data), change(self.scales), None if self.zeros is None else change(self.zeros))

    def rows(self, start: int, end: int) -> "Quantized":
        """Some rows of it, as views."""
        return self.each(lambda part: part[start:end])

    def numbers(self) -> torch.Tensor:
        """(N, K) int8, or float8 as it is."""
        return unpack(self.data) if self.data.dtype == torch.int32 else self.data

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, K) in this dtype, rounded once, from float32."""
        numbers = self.numbers().float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        return (numbers * self.scales.float()[:, :, None]).flatten(1).to(dtype)


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


def weight_reason(weight: Quantized) -> str | None:
    """Why the kernel cannot read this weight."""
    quad = QUAD * 8 // weight.bits
    if weight.scales.shape[1] > 1 and (weight.shape[1] % weight.scales.shape[1] or weight.group % quad):
        return f"a scale to {weight.group} columns, not a multiple of {quad}"
    for name, tensor in weight._asdict().items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} of the weight not contiguous"
    if weight.data.data_ptr() % 4:
        return "a weight not at a multiple of 4 bytes"
    if weight.data.dtype == torch.float8_e4m3fn and weight.zeros is not None:
        return "float8 with zeros"
    return float8_reason(weight.data.device, weight.data.dtype)


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype, group: int = 0, zeros: bool = False) -> Quantized:
    """The nearest numbers to weight (N, K), by rows or by groups of columns; scales in the weight's dtype.

    dtype: int8, int32 (4 bits) or float8_e4m3fn. group: columns to a scale, 0 for all. zeros: numbers from the least to
    the greatest value rather than evenly around 0.
    """
    values = weight.float().unflatten(1, (-1, group or weight.shape[1]))
    most = {torch.int8: 127, torch.int32: 7, torch.float8_e4m3fn: 448}[dtype]
    middle = None
    if zeros:
        low, high = values.amin(2, keepdim=True).clamp_max(0), values.amax(2, keepdim=True).clamp_min(0)
        scales = ((high - low) / (2 * most + 1)).clamp_min(1e-12).to(weight.dtype)
        middle = (-1 - most - low / scales.float()).round().clamp(-1 - most, most)
    else:
        scales = (values.abs().amax(2, keepdim=True) / most).clamp_min(1e-12).to(weight.dtype)
    numbers = values / scales.float()
    if dtype == torch.float8_e4m3fn:
        return Quantized(numbers.clamp(-most, most).flatten(1).to(dtype), scales[..., 0])
    numbers = (numbers if middle is None else numbers + middle).round().clamp(-1 - most, most).to(torch.int8).flatten(1)
    zero = None if middle is None else middle[..., 0].to(torch.int8)
    return Quantized(pack(numbers) if dtype == torch.int32 else numbers, scales[..., 0].contiguous(), zero)
