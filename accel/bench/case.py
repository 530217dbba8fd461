"""One thing to time: a model at its real size and the inputs of a few calls.

The inputs are those of a denoising loop: every call brings new latents and a new timestep, while the prompt stays the
same tensor. So whatever may be kept from step to step is kept here too, and nothing else is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SEED = 0
STEPS = 4  # different inputs, used in turn


@dataclass(frozen=True)
class Case:
    """`call(module, kwargs)` runs method `entry` of the module and gives one tensor.

    build(device, dtype):  the module with random weights, the same for the same seed and device.
    inputs(device, dtype): the keyword arguments of a few calls, at most STEPS of them.
    unnamed: the kind of device on which the case runs where none is named; None for nowhere.
    dtype: what it is usually run in on a GPU; None for float16.
    compiled: what torch.compile gets: the "whole" method, or the "blocks" that repeat, one by one, as diffusers'
        `compile_repeated_blocks` does. None leaves it out.
    exact: of how many calls, the last ones, full precision is computed too. With 0 accel is compared with stock, by
        `accel.tolerances.UNITS`.
    """

    name: str
    about: str
    build: Callable[[torch.device, torch.dtype], nn.Module]
    inputs: Callable[[torch.device, torch.dtype], list[dict]]
    entry: str = "forward"
    unnamed: str | None = "cuda"
    dtype: torch.dtype | None = None
    compiled: str | None = "whole"
    exact: int = STEPS

    def call(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        return self.run(module if self.entry == "forward" else getattr(module, self.entry), kwargs)

    def run(self, function: Callable, kwargs: dict) -> torch.Tensor:
        """The first output of the method, or of what stands for it; a list of images becomes a batch."""
        output = function(**kwargs, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output


def shapes(kwargs: dict) -> dict[str, list[int]]:
    """The shape of every tensor of a call, nested dicts and lists flattened with a dot."""
    found: dict[str, list[int]] = {}
    for key, value in kwargs.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inner, torch.Tensor):
            found[key] = list(inner.shape)
        elif isinstance(inner, dict):
            found |= {f"{key}.{name}": shape for name, shape in shapes(inner).items()}
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Arguments of a call with their floating-point tensors in this dtype."""
    if isinstance(value, dict):
        return {key: cast(inner, dtype) for key, inner in value.items()}
    if isinstance(value, list):
        return [cast(inner, dtype) for inner in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
