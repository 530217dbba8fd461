"""What ranks compute together inside of a block, as diffusers' context parallel attention does: steps like others.

diffusers calls torch's functional collectives, whose results are waited for when they are read. A step does both: on a
GPU waiting is for the stream, not for the host. Every rank makes the same steps, in the order that they were recorded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from accel.diffusion.dit.program import replaced

FUNCTIONAL = "_c10d_functional"  # the namespace of ops that give what they compute
IN_PLACE = "c10d"  # of those that write into what they are given, which no function of torch shows
WRAPS = "_wrap_tensor_autograd"  # gives a tensor that waits when it is read


class Collective:
    """A functional collective, and the wait for its result."""

    def __init__(self, function: Callable):
        self.function = function
        self.__name__ = getattr(function, "__name__", "collective")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        wait = torch.ops._c10d_functional.wait_tensor
        return replaced(result, lambda one: wait(one) if isinstance(one, torch.Tensor) else one)


class HiddenCollectives(TorchDispatchMode):
    """Notes whether anything inside of it writes into tensors what other ranks have sent."""

    found = False

    def looking(self) -> AbstractContextManager:
        """Around the code; nothing where this process is alone, as torch compiles other code inside of a mode."""
        ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return self if ranks else nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.found |= getattr(func, "namespace", "") == IN_PLACE
        return func(*args, **(kwargs or {}))


def functional(func: Callable) -> Callable:
    """Of a functional collective the step that it becomes; any other function itself."""
    name = str(func)
    if not name.startswith(FUNCTIONAL):
        return func
    if WRAPS in name:
        return _itself
    return func if "wait_tensor" in name else Collective(func)


def unwrapped(tree: Any) -> Any:
    """The tensors themselves in the place of those that would wait when they are read: a step has waited already."""
    return replaced(tree, lambda one: one.elem if type(one).__name__ == "AsyncCollectiveTensor" else one)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
