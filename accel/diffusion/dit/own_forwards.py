"""Linears whose weights lie in a library's own format: their own forwards, each a step of a program."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from accel.patching.structure import tampered
from accel.quantization.product import product


def in_own_format(module: nn.Module) -> bool:
    """Whether it is such a linear."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) and weight is not None and type(weight) is not nn.Parameter


def linears_in_own_formats(module: nn.Module) -> dict[str, nn.Module]:
    """By path; without those that stand in two places, of which one may be given another, and those with hooks."""
    found = [(path, one) for path, one in module.named_modules(remove_duplicate=False) if in_own_format(one)]
    places = Counter(one for _, one in found)
    plain = (pair for pair in found if "forward" not in vars(pair[1]) and tampered(pair[1]) is None)
    return {path: one for path, one in plain if places[one] == 1}


def stored_linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The step."""
    return product(module, x)


@contextmanager
def in_one_step(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a mode of this thread sees a call of `stored_linear` of each, and nothing that it calls."""
    for module in modules:
        vars(module)["forward"] = partial(_shown, module, module.forward)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def _shown(module: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and not kwargs and has_torch_function_unary(args[0]):
        return handle_torch_function(stored_linear, args, module, *args)
    return forward(*args, **kwargs)
