"""One call of a model or pipeline, made again as often as need be, each time from the same seed."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree


class SeededCall:
    """obj(*args, **kwargs), each time from the same seed and with generators in the state they came in."""

    def __init__(self, obj: Any, args: tuple, kwargs: dict, seed: int):
        self.obj, self.args, self.kwargs, self.seed = obj, args, kwargs, seed
        given = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        self.generators = [(generator, generator.get_state()) for generator in given]

    def __call__(self) -> Any:
        try:
            with seeded(self.seed):
                return self.obj(*self.args, **self.kwargs)
        finally:
            for generator, state in self.generators:
                generator.set_state(state)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Without gradients, from this seed; the caller's random states are put back."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(seed)
        yield


def as_tensors(obj: Any, args: tuple, kwargs: dict) -> dict:
    """Asks a pipeline that would give PIL images for tensors: eight bits hide small errors, and turn NaN into black."""
    try:
        signature = inspect.signature(obj)
        output_type = signature.parameters["output_type"]
        given = signature.bind_partial(*args, **kwargs).arguments
    except (KeyError, TypeError, ValueError):
        return kwargs
    return kwargs if "output_type" in given or output_type.default != "pil" else kwargs | {"output_type": "pt"}
