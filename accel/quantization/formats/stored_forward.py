"""Forwards of modules in float8 whose own rounds inputs, or needs a kernel that cannot be loaded."""

import inspect
from typing import Any

import torch
from torch import nn

from accel.libraries.code import lacks_kernel
from accel.patching.owner import InstanceMethod
from accel.quantization.formats.bytewise import float8_weight
from accel.quantization.formats.stored import StoredWeight
from accel.quantization.formats.stored_weight import read_stored


class StoredForward(InstanceMethod):
    """Of a linear: its product, with inputs as they are."""

    name = "forward"
    beneath = True  # it computes from the weights

    def __init__(self, module: Any):
        self.module = module

    @property
    def owner(self) -> Any:
        return self.module

    def call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = read_stored(self.module)
        return found(*args, **kwargs) if isinstance(found, StoredWeight) else self.stock(*args, **kwargs)


class StoredExperts(StoredForward):
    """Of experts that lack their kernel: the library's own loop over those that are chosen, with such products."""

    def call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        kind: Any = type(self.module)
        looping = kind.__new__(kind)
        vars(looping).update(vars(self.module), linear=self.linear)
        return inspect.unwrap(kind.forward)(looping, *args, **kwargs)

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, activation_scale: Any = None
    ) -> torch.Tensor:
        """The method of that name of one expert's matrix, (N, K)."""
        held = float8_weight(weight, scales, self.module.block_size)
        if isinstance(held, str):
            return type(self.module).linear(self.module, input, weight, scales, activation_scale)
        return StoredWeight(held, None, None)(input)


def packed_experts(module: nn.Module) -> bool:
    """Whether these are such experts."""
    return lacks_kernel(module) and hasattr(module, "num_experts")
