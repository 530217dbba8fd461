"""A layer lent to another device while it is worked on, so that a model may be larger than that device's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel.patching.patch import set_data


@contextmanager
def lent(module: nn.Module, device: torch.device | None, changed: bool = False) -> Iterator[None]:
    """Inside, the parameters and buffers of a module are on the device, or where they are for None; after, back.

    changed: what was done to their values inside stays; else they have the very memory they had before.
    """
    held = {id(one): one for one in chain(module.parameters(), module.buffers())} if device is not None else {}
    before = [(one, one.detach()) for one in held.values()]
    try:
        for one, _ in before:
            set_data(one, lambda data: data.to(device, copy=True))
        yield
    finally:
        for one, data in before:
            set_data(one, lambda now, home=data: now.to(home.device) if changed else home)


def moved(value: Any, device: torch.device | None) -> Any:
    """With all tensors in it, in tuples, lists and dicts, on the device; None: where they are."""
    return value if device is None else tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
