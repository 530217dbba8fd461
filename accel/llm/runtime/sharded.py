"""What stands in the place of a layer that transformers has divided among ranks."""

from typing import Any

import torch
from torch import nn

from accel.parallel.sharded_layers import Sharding
from accel.patching.fast_forward import FastForward, Kernels
from accel.patching.guard import changed_since
from accel.patching.ledger import Ledger


class ShardedForward(FastForward):
    """Computes from this rank's part of a weight. What it cannot take goes to the closure that transformers put there,
    which was the module's forward before.
    """

    def __init__(self, module: nn.Module, path: str, kernels: Kernels, ledger: Ledger, found: Sharding) -> None:
        super().__init__(module, path, kernels, ledger)
        self.sharding, self.around = found, vars(module)["forward"]

    def unfit(self, input: Any) -> str | None:
        if type(input) is not torch.Tensor:
            return f"input of type {type(input).__name__}"
        weight = self.module._parameters.get("weight")
        if weight is None or weight.device_mesh != self.sharding.mesh:
            return changed_since("how its weight is divided")
        if input.is_floating_point() and weight.dtype != input.dtype:
            return "weights of another dtype"
        return None
