"""An MLP as fused operations, or as a call of its module."""

import torch
from accel_kernels.norm.norm import ACTIVATIONS
from torch import nn

from accel.llm.analysis.mlp import MlpSpec
from accel.llm.runtime.linear import Weights
from accel.llm.runtime.part import BoundLinear, NormedInput, part_product
from accel.patching.fast_forward import Kernels
from accel.patching.guard import as_understood


class Changed(Exception):
    """Why a layer is no longer what was understood."""


class BoundMlp:
    """One MLP with the tensors it reads. gate, up: weights of one gated product, where they are plain."""

    def __init__(self, layer: nn.Module, spec: MlpSpec):
        self.spec = spec
        self.whole = layer.get_submodule(spec.whole) if spec.whole else None
        self.module: nn.Module | None = None
        self.times = 1
        if self._called(layer):
            if self.whole is None or not spec.alone:
                raise Changed("what its MLP was understood to be has changed")
            self.module = self.whole
            return
        self.first = [BoundLinear(layer.get_submodule(name)) for name in spec.first]
        self.down = BoundLinear(layer.get_submodule(spec.down))
        self.gate: Weights | None = None
        self.up: Weights | None = None
        parts = [linear.weights for linear in self.first if linear.weights is not None]
        plain = len(parts) == len(self.first)
        if plain and len(parts) == 2 and parts[0].fits(parts[1]):
            self.gate, self.up = parts
        elif plain and spec.halves is not None and parts[0].ranks is None:
            n = parts[0].outputs // 2
            halves = [parts[0]._replace(rows=rows) for rows in ((0, n), (n, n))]
            self.gate, self.up = halves if spec.halves else reversed(halves)
        self.times = len(self.first)

    def _called(self, layer: nn.Module) -> bool:
        """Whether the module itself must be called: unknown inside, or it or its activation is another now."""
        if not self.spec.first:
            return True
        return not all(as_understood(layer.get_submodule(name), known) for name, known in self.spec.settings)

    def __call__(
        self, kernels: Kernels, before: NormedInput, residual: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """residual + scale * mlp(norm(x))."""
        if self.module is None:
            return self.down(kernels, NormedInput(self._middle(kernels, before)), residual=residual, scale=scale)
        y = self.module(before.normed())
        y = y[0] if isinstance(y, tuple) else y
        return y if residual is None else torch.add(residual, y, alpha=scale)

    def _middle(self, kernels: Kernels, before: NormedInput) -> torch.Tensor:
        name = self.spec.activation
        if self.gate is not None:
            return part_product(kernels, self.gate, before, up=self.up, activation=name)
        if self.spec.halves is None and len(self.first) == 1:
            return self.first[0](kernels, before, activation=name)
        if self.spec.halves is None:
            gate, up = (linear(kernels, before) for linear in self.first)
        else:
            gate, up = self.first[0](kernels, before).chunk(2, dim=-1)
            gate, up = (gate, up) if self.spec.halves else (up, gate)
        return ACTIVATIONS[name](gate) * up
