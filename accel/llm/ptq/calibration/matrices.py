"""The matrices of linear layers, read and replaced, for good or for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from accel.llm.runtime.linear import weights
from accel.patching.patch import set_data


def weight_matrix(module: nn.Module) -> Tensor:
    """The weight of a linear as (out, in)."""
    return module.weight.detach().t() if weights(module).transposed else module.weight.detach()


def put(module: nn.Module, matrix: Tensor) -> None:
    """A linear's weight becomes a matrix (out, in), in its own dtype and layout."""
    value = matrix.t() if weights(module).transposed else matrix
    set_data(module.weight, lambda data: value.to(data.dtype).contiguous())


@contextmanager
def trial(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """After it, the parameters are what they were before: what is given new data inside is given back its own."""
    before = [(parameter, parameter.detach()) for parameter in parameters]
    try:
        yield
    finally:
        for parameter, data in before:
            set_data(parameter, lambda _, data=data: data)
