"""Noise as large as rounding, added to what modules give: how far stock moves by that."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Noise:
    """A forward hook that moves outputs by a share of their root mean square; the same noise in every call."""

    def __init__(self, size: float):
        self.size = size

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return pytree.tree_map(self._moved, output)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device)
        scale = self.size * value.float().square().mean().sqrt()
        return (value.float() + scale * noise).to(value.dtype)


@contextmanager
def with_noise(sizes: Iterable[tuple[nn.Module, float]]) -> Iterator[None]:
    """Inside, what each module gives is moved by noise of its size."""
    with ExitStack() as undo:
        for module, size in sizes:
            undo.callback(module.register_forward_hook(Noise(size)).remove)
        yield
