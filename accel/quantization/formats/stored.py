"""What a reader gives: a weight as a library holds it, with what its module does around the product."""

from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels import BlockWeight, Quantized, quantized_linear
from accel_kernels.gemm.epilogue import Epilogue
from accel_kernels.gemm.quantized_weight import BY_DTYPE, WeightFormat

MISPLACED = "its tensors are not there, or not in their place"


class ScaledBytes(NamedTuple):
    """Numbers of 8 bits (N, K), int8 or float8_e4m3fn, in the formats of ours but for what lies beside them.

    scales: one to each block of so many rows and columns, row after row of blocks. zeros: int8 alike, or None.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    block: tuple[int, int]

    @property
    def format(self) -> WeightFormat:
        return BY_DTYPE[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda

    @property
    def kind(self) -> tuple:
        """As of `BlockWeight`."""
        return self.format, self.shape, self.block, self.data.device, self.scales.dtype, self.zeros is None

    def first(self, rows: int) -> "ScaledBytes":
        """The first rows of it, in the same memory."""
        return self._replace(data=self.data[:rows])

    def quantized(self) -> Quantized:
        """The same numbers with scales by row and group of columns, written out for this one use."""
        return Quantized.of(
            self.data, self._by_row(self.scales), None if self.zeros is None else self._by_row(self.zeros)
        )

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """(N, K) in this dtype, rounded once from float32."""
        return self.quantized().dequantized(dtype)

    def _by_row(self, beside: torch.Tensor) -> torch.Tensor:
        (rows, columns), (tall, wide) = self.data.shape, self.block
        beside = beside.float() if beside.dtype == torch.float8_e8m0fnu else beside
        beside = beside.reshape(-1, -(-columns // wide))
        if columns % wide:  # the last group is smaller: groups of what divides both
            size = gcd(wide, columns)
            beside = beside.repeat_interleave(wide // size, 1)[:, : columns // size]
        return (beside if tall == 1 else beside.repeat_interleave(tall, 0))[:rows].contiguous()


def as_bytes(parameter: torch.Tensor) -> torch.Tensor:
    """uint8 in the same memory, without the class that a library has for its parameters, which every use would ask."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(torch.Tensor).view(torch.uint8)


class StoredWeight(NamedTuple):
    """A linear of another library. bias: (N,) or None. dtype: to which it casts its inputs, and in which it multiplies,
    before the result is cast back; None: that of the inputs. step: by which it divides inputs to round them to float8,
    and what computes with this value does not; None where it does not either.
    """

    weight: BlockWeight | ScaledBytes
    bias: torch.Tensor | None
    dtype: torch.dtype | None
    step: torch.Tensor | float | None = None

    @property
    def kind(self) -> tuple:
        """Equal for linears that one operation can take."""
        return self.weight.kind, self.dtype

    @property
    def operand(self) -> BlockWeight | Quantized:
        """The weight as `quantized_linear` takes it."""
        return self.weight.quantized() if isinstance(self.weight, ScaledBytes) else self.weight

    @property
    def misplaced(self) -> bool:
        """Whether tensors of it are not there yet, or not in their place."""
        held = self.weight
        tensors = [one for one in (*held, *getattr(held, "side", ())) if isinstance(one, torch.Tensor)]
        return any(not one.is_contiguous() or one.device != held.data.device or one.is_meta for one in tensors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the linear gives; gradients flow to x alone."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
            return F.linear(x, self.weight.dequantized(x.dtype), self.bias)
        x = x.contiguous()
        return stored_product(quantized_linear, x, self.operand, self.dtype, lambda: x, bias=self.bias)


def stored_product(
    multiply: Callable, x: torch.Tensor, weight: Any, dtype: torch.dtype | None, normed: Callable, **given: Any
) -> torch.Tensor:
    """What the op `quantized_linear` gives of x, a norm and `Epilogue`, for a linear that multiplies in this dtype.

    multiply: the op. normed: gives x after the norm, where the op is not to take it. given: the op's other arguments.
    """
    if x.is_cuda and dtype == torch.float32 and x.numel() == weight.shape[1]:  # one row is summed in float32 anyway
        return multiply(x, weight, **given)
    if dtype in (None, x.dtype):
        biases = {name: given[name] for name in ("bias", "up_bias") if given.get(name) is not None}
        return multiply(x, weight, **given | {name: one.to(x.dtype) for name, one in biases.items()})
    given.pop("norm", None)
    h = normed().to(dtype).contiguous()

    def product(one: Any, shift: torch.Tensor | None) -> torch.Tensor:
        return multiply(h, one, None if shift is None else shift.to(dtype)).to(x.dtype)

    return Epilogue(**given).in_passes(weight, product)
