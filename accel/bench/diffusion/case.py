"""One thing to time: a model of diffusers at its real size, and the inputs of a few calls.

The inputs are those of a denoising loop: every call brings new latents and a new timestep, while the prompt stays the
same tensor. So whatever may be kept from step to step is kept here too, and nothing else is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from accel.bench.diffusion.configs import whole_config
from accel.bench.diffusion.inputs import Calls, Draw, Sizes
from accel.bench.weights import random_model


@dataclass(frozen=True)
class Case:
    """A class of diffusers with random weights, what is changed of its default configuration, and its sizes.

    calls: makes the keyword arguments of a few calls of method `entry`, from the whole configuration and the sizes.
    unnamed: the kind of device on which the case runs where none is named; None for nowhere.
    dtype: what it is usually run in on a GPU.
    compiled: what torch.compile gets: the "whole" method, or the "blocks" that repeat, one by one, as diffusers'
        `compile_repeated_blocks` does. None leaves it out.
    drawn: whether weights that begin as zeros or ones are drawn as well.
    """

    name: str
    about: str
    class_name: str
    calls: Calls
    config: dict
    sizes: Sizes
    entry: str = "forward"
    unnamed: str | None = None
    dtype: torch.dtype = torch.bfloat16
    compiled: str | None = "blocks"
    drawn: bool = True

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module, the same for the same device and dtype."""
        return random_model(self.class_name, self.config, device, dtype, self.drawn)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> list[dict]:
        """The keyword arguments of a few calls."""
        return self.calls(Draw(whole_config(self.class_name, self.config), self.sizes, device, dtype))

    def call(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        """The first output of the method; a list of images becomes a batch."""
        return self.run(module if self.entry == "forward" else getattr(module, self.entry), kwargs)

    def run(self, function: Callable, kwargs: dict) -> torch.Tensor:
        """The same of what stands for the method."""
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
