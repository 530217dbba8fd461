"""Where things are in a language model, by what they are."""

from collections.abc import Callable

import torch
from torch import nn

from support.llm.families import layers


def first(model) -> nn.Module:
    """The first decoder layer."""
    return next(iter(layers(model).values()))


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def matrices(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_modules() if is_matrix(child)}


def matrix(model, number: int = 0) -> nn.Module:
    """Of the first layer: 0 is of the queries, -1 the last of the MLP in most families."""
    return list(matrices(first(model)).values())[number]


def norm(model) -> nn.Module:
    found = (m for m in first(model).modules() if "norm" in type(m).__name__.lower() and hasattr(m, "weight"))
    return next(found)


def part(model, number: int) -> nn.Module:
    """The number-th child of the first layer that holds matrices: its attention, its MLP."""
    return [child for child in first(model).children() if matrices(child) and not is_matrix(child)][number]


def swap(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)


def random(like: torch.Tensor, scale: float = 0.05, seed: int = 3) -> torch.Tensor:
    return scale * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def do(action: Callable) -> Callable:
    def step(model):
        action(model)

    return step


def attention(model) -> nn.Module:
    return part(model, 0)


def mlp(model) -> nn.Module:
    return part(model, 1)
