"""The matrices of linear layers, read and replaced, for good or for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from accel.llm.runtime.linear import holds_transposed
from accel.patching.patch import set_data
from accel.quantization.linears import Dense


def weight_matrix(module: Dense) -> Tensor:
    """The weight of a linear as (out, in)."""
    return module.weight.detach().t() if holds_transposed(module) else module.weight.detach()


def put(module: Dense, matrix: Tensor) -> None:
    """A linear's weight becomes a matrix (out, in), in its own dtype and layout."""
    value = matrix.t() if holds_transposed(module) else matrix
    set_data(module.weight, lambda data: value.to(data.dtype).contiguous())


@contextmanager
def trial(parameters: Iterable[Tensor]) -> Iterator[None]:
    """After it, the parameters are what they were before: what is given new data inside is given back its own."""
    before = [(parameter, parameter.detach()) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, data in before:
            set_data(parameter, lambda _, data=data: data)
