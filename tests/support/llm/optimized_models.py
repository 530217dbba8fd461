"""Models optimized once a process: to optimize a tiny one takes as long as ten copies of it, or twenty calls."""

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import nn

import accel
from support.llm.families import make


class Optimized(NamedTuple):
    """ours and stock are for tests that leave no trace; spare: a copy of ours before its first call."""

    ours: nn.Module
    stock: nn.Module
    spare: nn.Module


@functools.cache
def shared(name: str, dtype: torch.dtype = torch.float32, changes: tuple = (), **options: Any) -> Optimized:
    """The one of these options; skips what this transformers does not have. changes: items of the configuration.

    Nothing of accel may be replaced when it is first asked for: what is made here is what later tests get.
    """
    stock = make(name, dtype, **dict(changes))
    ours = accel.optimize(copy.deepcopy(stock), **options)
    return Optimized(ours, stock, copy.deepcopy(ours))


def pair(name: str, dtype: torch.dtype = torch.float32, changes: tuple = (), **options: Any) -> tuple:
    """(optimized, stock) that a test may change."""
    found = shared(name, dtype, changes, **options)
    return copy.deepcopy(found.spare), copy.deepcopy(found.stock)


def optimized(name: str, dtype: torch.dtype = torch.float32, changes: tuple = (), **options: Any) -> nn.Module:
    """A model that a test may change."""
    return copy.deepcopy(shared(name, dtype, changes, **options).spare)
