"""Noise as large as rounding, added to what modules give: how far stock moves by that."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.in_flight import Here


class Noise:
    """A forward hook that moves outputs by a share of their root mean square; the same noise in every call."""

    seed = 0

    def __init__(self, size: float):
        self.size = size

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return pytree.tree_map(self._moved, output)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        # Of a CPU and a seed: ranks that share a model all draw the same.
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(self.seed)).to(value.device)
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return (wide + self.scale(value) * noise).to(value.dtype)

    def scale(self, value: torch.Tensor) -> torch.Tensor:
        """The noise's standard deviation."""
        return self.size * value.float().square().mean().sqrt()


class RoundingNoise(Noise):
    """Moves every number by so many eps of its dtype: where few channels or tokens are a thousand times larger than
    others, those others are not moved by more than rounding moves them.

    seed: noise of each layer is to be its own. Equal noise adds up from layer to layer, and rounding does not.
    """

    def __init__(self, size: float, seed: int):
        super().__init__(size)
        self.seed = seed

    def scale(self, value: torch.Tensor) -> torch.Tensor:
        return self.size * torch.finfo(value.dtype).eps * value.abs()


@contextmanager
def with_noise(sizes: Iterable[tuple[nn.Module, float]]) -> Iterator[None]:
    """Inside, what each module gives is moved by noise of its size."""
    with _hooked((module, Noise(size)) for module, size in sizes):
        yield


@contextmanager
def with_rounding(modules: Iterable[nn.Module], size: float) -> Iterator[None]:
    """Inside, what each module gives is moved as by rounding of so many eps, each by noise of its own."""
    with _hooked((module, RoundingNoise(size, seed)) for seed, module in enumerate(modules)):
        yield


@contextmanager
def _hooked(hooks: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    with ExitStack() as undo:
        for module, hook in hooks:
            undo.callback(module.register_forward_hook(Here(hook)).remove)
        yield
