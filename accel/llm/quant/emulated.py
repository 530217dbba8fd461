"""Inputs of linears rounded to int8 and back, token by token, while a model is calibrated in its own precision."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from accel.quant.activations import KERNELS


def rounded_by_token(x: Tensor) -> Tensor:
    """x: (..., K), each row as its 8-bit numbers and scale stand for, in the dtype of x."""
    return KERNELS.rounded(x, "int8").dequantised(x.dtype)


@contextmanager
def rounding_inputs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these linears are called with their input rounded by token."""

    def rounded(module, args, kwargs):
        return tuple(map(rounded_by_token, args)), {name: rounded_by_token(value) for name, value in kwargs.items()}

    with ExitStack() as undo:
        for module in modules:
            undo.callback(module.register_forward_pre_hook(rounded, with_kwargs=True).remove)
        yield
