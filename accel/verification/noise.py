"""Noise as large as rounding, added to what modules give: how far stock moves by that."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from accel.in_flight import listening


class Noise:
    """A forward hook that adds noise to outputs, the same in every call. scale: its standard deviation, of a tensor."""

    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor], seed: int = 0):
        self.scale, self.seed = scale, seed

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return pytree.tree_map(self._moved, output)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        # Of a CPU and a seed: ranks that share a model all draw the same.
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(self.seed), device="cpu").to(
            value.device
        )
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return (wide + self.scale(value) * noise).to(value.dtype)


def _of_rms(size: float, value: torch.Tensor) -> torch.Tensor:
    return size * value.float().square().mean().sqrt()


def with_noise(sizes: Iterable[tuple[nn.Module, float]]) -> AbstractContextManager[None]:
    """Inside, what each module gives is moved by noise of this share of its root mean square."""
    return listening((module, Noise(partial(_of_rms, size))) for module, size in sizes)


def with_rounding(
    modules: Iterable[nn.Module], size: float, dtype: torch.dtype | None = None
) -> AbstractContextManager[None]:
    """Inside, every number that a module gives is moved by so many eps of its dtype, or of this one: large channels or
    tokens do not move others. Each module has noise of its own: equal noise would add up from layer to layer, as
    rounding does not.
    """

    def step(value: torch.Tensor) -> torch.Tensor:
        return size * torch.finfo(dtype or value.dtype).eps * value.abs()

    return listening((module, Noise(step, seed)) for seed, module in enumerate(modules))
