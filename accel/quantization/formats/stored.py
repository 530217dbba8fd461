"""What a reader gives: a weight in blocks with what its module does around the product."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accel_kernels import BlockWeight, block_linear
from accel_kernels.gemm.epilogue import Epilogue


class StoredWeight(NamedTuple):
    """A linear of another library. bias: (N,) or None. dtype: to which it casts its inputs, and in which it multiplies,
    before the result is cast back; None: that of the inputs. step: by which it divides inputs to round them to float8,
    and what computes with this value does not; None where it does not either.
    """

    weight: BlockWeight
    bias: torch.Tensor | None
    dtype: torch.dtype | None
    step: torch.Tensor | float | None = None

    @property
    def kind(self) -> tuple:
        """Equal for linears that one operation can take."""
        return self.weight.kind, self.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the linear gives."""
        x = x.contiguous()
        return block_product(block_linear, x, self.weight, self.dtype, lambda: x, bias=self.bias)


def block_product(
    multiply: Callable, x: torch.Tensor, weight: BlockWeight, dtype: torch.dtype | None, normed: Callable, **given: Any
) -> torch.Tensor:
    """What the op `block_linear` gives of x, a norm and `Epilogue`, for a linear that multiplies in this dtype.

    multiply: the op. normed: gives x after the norm, where the op is not to take it. given: the op's other arguments.
    """
    if x.is_cuda and dtype == torch.float32 and x.numel() == weight.columns:  # one row is summed in float32 anyway
        return multiply(x, weight, **given)
    if dtype in (None, x.dtype):
        biases = {name: given[name] for name in ("bias", "up_bias") if given.get(name) is not None}
        return multiply(x, weight, **given | {name: one.to(x.dtype) for name, one in biases.items()})
    given.pop("norm", None)
    h = normed().to(dtype).contiguous()

    def product(one: BlockWeight, shift: torch.Tensor | None) -> torch.Tensor:
        return multiply(h, one, None if shift is None else shift.to(dtype)).to(x.dtype)

    return Epilogue(**given).in_passes(weight, product)
