"""A place in a model: a module and the path to it."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Site:
    """`path` is the module's name from the model that `optimize` was given or found in a pipeline; "" is that model."""

    path: str
    module: nn.Module

    def children(self) -> Iterator["Site"]:
        for name, child in self.module.named_children():
            yield Site(f"{self.path}.{name}" if self.path else name, child)
