"""What a module computes: its stock forward run against a candidate, on small random inputs.

Structure says which formula a block should be; the probe makes sure. It runs none of the user's own code, touches no
weights, and draws from a generator of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accel.errors import reason_of
from accel.patching.structure import placement, side_effects
from accel.tolerances import BLOCK, bound

# Relative to the largest output. A wrong formula is off by the order of 1; rounding stays far below.


class Probe:
    """Compares candidates with stock; remembers the verdict per kind, since blocks of one kind come in dozens."""

    def __init__(self) -> None:
        self.verdicts: dict[tuple, str | None] = {}

    def disagreement(
        self, module: nn.Module, candidate: Callable, args: tuple, kwargs: dict | None = None, variant: object = None
    ) -> str | None:
        """None where candidate(*args) equals the module's stock forward, else how far they are apart.

        variant: tells candidates of one class and their inputs apart, where a kind of module is tried with several.
        """
        reason = side_effects(module)
        if reason is not None:
            return reason
        key = (*_kind(module), type(getattr(candidate, "__self__", candidate)), variant)
        if key not in self.verdicts:
            self.verdicts[key] = _compare(module, candidate, args, kwargs or {})
        return self.verdicts[key]


def example(module: nn.Module, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random input of the module's device and dtype, from a generator of its own."""
    device, dtype = placement(module)
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed)).to(device, dtype)


def _kind(module: nn.Module) -> tuple:
    """All that can change the formula, and nothing that only changes sizes."""
    settings = tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | str | float) and name != "training"
    )
    children = tuple((name, type(child)) for name, child in module.named_modules())
    tensors = tuple((name, tensor.dtype) for name, tensor in module.named_parameters())
    processor = type(getattr(module, "processor", None))
    return type(module), settings, children, tensors, processor


def _compare(module: nn.Module, candidate: Callable, args: tuple, kwargs: dict) -> str | None:
    training = [(child, child.training) for child in module.modules()]
    try:
        for child, _ in training:
            child.training = False
        with torch.no_grad():
            wanted = type(module).forward(module, *args, **kwargs)
            got = candidate(*args, **kwargs)
    except Exception as error:  # a block that cannot run this call is not the block we know
        return f"could not be examined: {reason_of(error)}"
    finally:
        for child, flag in training:
            child.training = flag
    wanted, got = (_first(output) for output in (wanted, got))
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return f"gives {tuple(wanted.shape)} {wanted.dtype}, not {tuple(got.shape)} {got.dtype}"
    off = float((wanted.float() - got.float()).abs().max() / wanted.float().abs().max().clamp_min(1e-6))
    if not off <= bound(BLOCK, wanted.dtype):
        return f"computes something else: off by {off:.1e} of the largest output"
    return None


def _first(output: Any) -> torch.Tensor:
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output
