"""A matrix in fewer bits: whole numbers with scales, by row or by groups of columns; and how numbers lie in memory.

w[n, k] = (number[n, k] - zeros[n, g]) * scales[n, g], g = k // group; of MXFP4 numbers are floats of 4 bits, and scales
powers of two. The arrangement in memory is that of compressed
tensors on disk (the formats "int-quantized", "pack-quantized" and "float-quantized" of the package compressed-tensors),
so what was saved is what kernels read. Only the zero points of 4-bit numbers, and 8-bit integers that meet activations
in 16 bits, are packed into words there; here they are a byte each.

A `WeightFormat` is one way to store numbers, ours or a library's (`blocks/`). To add one, write its `unpack`, and its
`pack` if weights are rounded to it: they are then written out before each product. Where kernels are to read it as it
lies, an `unpacking_triton` unpacks it there, and `most_rows` says for how many rows.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from math import gcd
from typing import Any, NamedTuple

import torch

from accel_kernels.gemm.quantized.dequantized_once import dequantized_once
from accel_kernels.op import dtype_reason

WORD = 32  # bits
PER_WORD = 8  # 4-bit numbers to an int32
E2M1_SHIFT = 14  # from the exponents of MXFP4's numbers to those of float16
MX_GROUP = 32  # numbers of MXFP4 to a scale
ZERO_POINT = 8  # what a 4-bit number is stored above itself: -8..7 as 0..15
# Rows of x up to which a product reads the numbers as they lie. To write a weight of 8 bits out for cuBLAS, and read it
# there, moves five times its bytes; of more rows, multiplying takes longer than that.
MOST_QUANTIZED_ROWS = 512
MOST_GROUPED_ROWS = 64  # of a weight with float32 scales by group, whose 128 rows took four times bf16's time
MOST_BLOCK_ROWS = 16  # the same of a library's blocks, which take more instructions
MOST_FRAGMENT_ROWS = 64  # the same of blocks that are read as factors of the tensor cores
MOST_UNPACKED_ROWS = 256  # the same of blocks that some warps unpack for others


def pack(numbers: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """(N, K) of whole numbers of 2 to 8 bits as int32 (N, K bits / 32), stored plus half their range, the first in the
    lowest bits. Raises ValueError where K is not a multiple of 32 / bits.
    """
    if numbers.shape[1] * bits % WORD:
        raise ValueError(f"{numbers.shape[1]} columns: {bits}-bit numbers are packed into words of {WORD} bits")
    count, size = _period(bits)
    places = numbers.to(torch.int8).view(torch.uint8).add(1 << bits - 1).unflatten(1, (-1, count))
    packed = torch.zeros((*places.shape[:2], size), dtype=torch.uint8, device=numbers.device)
    for place in range(count):
        byte, shift = divmod(place * bits, 8)
        packed[..., byte] |= places[..., place] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= places[..., place] >> 8 - shift
    return packed.flatten(1).view(torch.int32)


def unpack(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """`pack` taken back: int8 (N, K)."""
    count, size = _period(bits)
    # The lowest byte first, as every machine that torch runs on has them.
    packed = words.contiguous().view(torch.uint8).unflatten(1, (-1, size))
    numbers = torch.empty((*packed.shape[:2], count), dtype=torch.uint8, device=words.device)
    for place in range(count):
        byte, shift = divmod(place * bits, 8)
        torch.bitwise_right_shift(packed[..., byte], shift, out=numbers[..., place])
        if shift + bits > 8:
            numbers[..., place] |= packed[..., byte + 1] << 8 - shift
    return numbers.bitwise_and_((1 << bits) - 1).sub_(1 << bits - 1).view(torch.int8).flatten(1)


def _period(bits: int) -> tuple[int, int]:
    """The fewest numbers of so many bits that fill whole bytes, and those bytes."""
    return 8 // gcd(bits, 8), bits // gcd(bits, 8)


def pack_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """(N, K) of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below 0 as int32 (N, K / 8); others are cut towards 0."""
    bits = (numbers * 2.0**-E2M1_SHIFT).half().view(torch.int16)
    return pack(((bits >> 9 & 7) | (bits >> 12 & 8)) - ZERO_POINT)


def e2m1_numbers(weight: "Quantized") -> torch.Tensor:
    """Float16 of the same numbers: sign, exponent and fraction where that has them, but for another bias."""
    bits = unpack(weight.data).int() + ZERO_POINT
    return ((bits & 7) << 9 | (bits & 8) << 12).to(torch.int16).view(torch.float16) * 2.0**E2M1_SHIFT


def unchanged(numbers: torch.Tensor) -> torch.Tensor:
    """As it is: a number to each stored element."""
    return numbers


def stored_numbers(weight: "Quantized") -> torch.Tensor:
    """The same of a weight."""
    return weight.data


def packed_numbers(weight: "Quantized") -> torch.Tensor:
    """Of 4-bit numbers in words."""
    return unpack(weight.data)


@dataclass(frozen=True)
class WeightFormat:
    """One way to store numbers, in blocks of so many columns and bytes; in formats of ours a block is an element.

    name: what schemes and reports call it, and what kernels are compiled for. unpack: a weight to (N, K), its values,
    or numbers that have scales beside them. most_rows: rows of x up to which kernels read it as it lies; 0: none does.
    source: how kernels read it that have factors of the tensor cores in blocks, "" where they cannot.

    Of formats that weights are rounded to: dtype of the elements; largest: the largest number; pack: numbers (N, K) to
    elements (N, ..); exact: a dtype that holds every number; saved: what compressed-tensors calls their type, "" where
    it has no layout.
    """

    name: str
    columns: int
    bytes: int
    unpack: Callable[[Any], torch.Tensor]
    _: KW_ONLY
    most_rows: int = MOST_BLOCK_ROWS
    source: str = ""
    dtype: torch.dtype = torch.uint8
    largest: float = 0
    pack: Callable[[torch.Tensor], torch.Tensor] = unchanged
    exact: torch.dtype = torch.float16
    saved: str = ""

    @property
    def bits(self) -> int:
        """Of a number, in whole bits."""
        return 8 * self.bytes // self.columns

    def range(self, symmetric: bool = True) -> tuple[float, float]:
        """Least and largest number; those of whole numbers reach one further down where 0 does not stand for 0."""
        return -self.largest - (not symmetric and not self.dtype.is_floating_point), self.largest

    def nearest(self, steps: torch.Tensor, symmetric: bool = True) -> torch.Tensor:
        """The numbers nearest to these floats, int8 or float8."""
        low, high = self.range(symmetric)
        if self.dtype.is_floating_point:
            return steps.clamp(low, high).to(self.dtype)
        return steps.round().clamp(low, high).to(torch.int8)


def _format(name: str, columns: int, size: int, unpack: Callable, **more: Any) -> WeightFormat:
    return WeightFormat(name, columns, size, unpack, most_rows=MOST_QUANTIZED_ROWS, **more)


# No call of torch: files of kernels are read without it.
INT8 = _format("int8", 1, 1, stored_numbers, dtype=torch.int8, largest=127, saved="int")
INT4 = _format("int4", PER_WORD, 4, packed_numbers, dtype=torch.int32, largest=7, pack=pack, saved="int")
FP8 = _format("fp8", 1, 1, stored_numbers, dtype=torch.float8_e4m3fn, largest=448, saved="float")
# OCP, "Microscaling formats specification", 2023; two numbers to a byte, the first in its lower half.
MXFP4 = _format("mxfp4", PER_WORD, 4, e2m1_numbers, dtype=torch.int32, largest=6, pack=pack_e2m1)
FORMATS = {format.name: format for format in (INT8, INT4, FP8, MXFP4)}
BY_DTYPE = {format.dtype: format for format in (INT8, INT4, FP8)}  # those that their elements tell apart

QUAD = 16  # bytes of the weight that a thread reads at a time; a scale covers whole ones
PARTS = ("data", "scales", "zeros")  # the tensors of a weight


class Quantized(NamedTuple):
    """A weight (N, K).

    data: stored elements (N, K / columns of the format): int8, float8_e4m3fn, or int32 of eight 4-bit numbers each,
    the first in the lowest bits, stored plus 8. scales: (N, K / group), in the dtype of the model or float32; of MXFP4
    float8_e8m0fnu. zeros: (N, K / group) int8: the numbers that stand for 0, or None where 0 does. format: how numbers
    lie in data. order: (K,) int32, which input each column of data multiplies, where these are not in order, as of
    GPTQ's "act-order"; None where they are.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, data: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> "Quantized":
        """In the format that the dtype of data tells."""
        return cls(data, scales, zeros, BY_DTYPE[data.dtype])

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.data.shape
        return rows, columns * self.format.columns

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

    @property
    def float_scales(self) -> torch.Tensor | None:
        """None where scales are exponents."""
        return None if self.scales.dtype == torch.float8_e8m0fnu else self.scales

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors there are, by name."""
        return {name: part for name, part in zip(PARTS, self, strict=False) if isinstance(part, torch.Tensor)}

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Quantized":
        """The same of change(part) for every part there is."""
        zeros = None if self.zeros is None else change(self.zeros)
        return self._replace(data=change(self.data), scales=change(self.scales), zeros=zeros)

    def rows(self, start: int, end: int) -> "Quantized":
        """Some rows of it, as views."""
        return self.each(lambda part: part[start:end])

    @property
    def most_rows(self) -> int:
        """Of x, up to which kernels read it as it lies; for more it is written out before the product."""
        grouped = self.scales.shape[1] > 1 and self.scales.dtype == torch.float32
        return min(MOST_GROUPED_ROWS, self.format.most_rows) if grouped else self.format.most_rows

    @property
    def kind(self) -> tuple:
        """Equal for weights that one operation can take, as gate and up."""
        return self.format, *((name, part.shape, part.dtype) for name, part in self.parts().items())

    def reason(self) -> str | None:
        """Why kernels cannot read this weight; float8 is the caller's to look for."""
        quad, columns = QUAD * 8 // self.format.bits, self.shape[1]
        if self.data.numel() == 0:
            return "empty"
        if self.order is not None:
            return "columns in an order of their own"
        if not self.format.most_rows:
            return f"no kernel reads {self.format.name}"
        if columns % 8:
            return f"{columns} inputs, not a multiple of 8"
        if self.scales.shape[1] > 1 and (columns % self.scales.shape[1] or self.group % quad):
            return f"a scale to {self.group} columns, not a multiple of {quad}"
        for name, tensor in self.parts().items():
            if not tensor.is_contiguous():
                return f"{name} of the weight not contiguous"
        if self.data.data_ptr() % 4:
            return "a weight not at a multiple of 4 bytes"
        if self.format == FP8 and self.zeros is not None:
            return "float8 with zeros"
        return dtype_reason(self.float_scales)

    def numbers(self) -> torch.Tensor:
        """(N, K) int8, or float8 as it is; a column to each input, in order."""
        numbers = self.format.unpack(self)
        return numbers if self.order is None else _columns(numbers, self.order.argsort())

    def by_order(self, order: torch.Tensor | None) -> "Quantized":
        """The same numbers so that column k is that of the input order[k]; scales are those of groups in this order."""
        return (
            self
            if order is None
            else self._replace(data=self.format.pack(_columns(self.numbers(), order)), order=order)
        )

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, K) in this dtype, rounded once, from float32. Nobody may write into it, see `dequantized_once`."""
        return dequantized_once((*self.parts().values(), self.order), dtype, self._dequantized)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        numbers = self.format.unpack(self).float().unflatten(1, (-1, self.group))
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        values = (numbers * self.scales.float()[:, :, None]).flatten(1).to(dtype)
        return values if self.order is None else values.index_select(1, self.order.argsort())


def _columns(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int8).index_select(1, order).view(numbers.dtype)


class PackedWeight(NamedTuple):
    """A weight as kernels take it, its numbers as 32-bit words with scales and zeros in one argument.

    words: int32 (N, K / 4), of 4-bit numbers (N, K / 8); all else as of `Quantized`, exponents as uint8. None: no such
    weight.
    """

    words: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: Quantized | None) -> "PackedWeight":
        if weight is None:
            return cls()
        return cls(weight.data.view(torch.int32), scale_bits(weight), weight.zeros, weight.order)


def scale_bits(weight: Quantized) -> torch.Tensor:
    """The scales as kernels read them."""
    return weight.scales if weight.float_scales is not None else weight.scales.view(torch.uint8)


def mxfp4_weight(weight: torch.Tensor) -> Quantized:
    """weight (N, K), K a multiple of 32, in MXFP4: exactly where it came from that, or can, else cut towards 0.

    The largest number of a group has the largest exponent there is: so all that another scale allows is allowed.
    """
    groups = weight.float().unflatten(1, (-1, MX_GROUP))
    exponents = (torch.frexp(groups.abs().amax(2)).exponent - 3).clamp(-126, 127 - E2M1_SHIFT)
    numbers = groups * ((127 - exponents) << 23).view(torch.float32)[..., None]
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantized(MXFP4.pack(numbers.flatten(1)), scales, None, MXFP4)


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
