"""Weights replaced and written to, in every way that torch has."""

from collections.abc import Callable

import torch
from torch import nn

from support.llm.edits.places import first, matrices, matrix, random


def other_weights(model) -> None:
    model.load_state_dict({name: tensor + random(tensor) for name, tensor in model.state_dict().items()})


def assigned_weights(model) -> None:
    model.load_state_dict({name: tensor + random(tensor) for name, tensor in model.state_dict().items()}, assign=True)
    model.tie_weights()


def new_data(model) -> None:
    matrix(model).weight.data = matrix(model).weight.data + random(matrix(model).weight)


def new_data_of_the_second(model) -> None:
    """The same Parameter at another address, behind the first of the weights that were put into one storage."""
    second = list(matrices(first(model)).values())[1]
    second.weight.data = second.weight.data + random(second.weight)


def in_place(*found: Callable) -> Callable:
    def step(model):
        for find in found:
            with torch.no_grad():
                find(model).weight.add_(random(find(model).weight, 0.3))

    return step


def new_bias(model) -> None:
    module = matrix(model)
    width = module.weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
    module.bias = nn.Parameter(random(module.weight.new_empty(width), 0.3))


def through_data(model) -> None:
    """Writes that autograd does not count."""
    for module in matrices(first(model)).values():
        module.weight.data.mul_(-1)
