"""Hooks of accelerate that only bring inputs to where weights lie, as a `device_map` over several cards has them."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from accel.libraries.hooks import ALIGNING, BENEATH, FORWARD, execution_device, hook_of, is_hook
from accel.patching.structure import stock_method


def wrapper_of(module: nn.Module) -> Callable | None:
    """What accelerate has put in place of the module's forward; None without a hook."""
    return None if hook_of(module) is None else vars(module).get(FORWARD)


class StockHere:
    """The layer's own forward on this thread, what stood in its place on others."""

    beneath = True

    def __init__(self, layer: nn.Module, elsewhere: Callable):
        self.layer, self.elsewhere, self.thread = layer, elsewhere, threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return self.elsewhere(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)


def device_of(module: nn.Module) -> torch.device | None:
    """Where a hook of this module brings what it is called with; None for one without a hook, or with another kind."""
    hook = hook_of(module)
    return None if hook is None or other_hook(module) is not None else execution_device(hook)


def other_hook(module: nn.Module) -> str | None:
    """Why a module's hook may do more than bring inputs to its weights; None for one that does not, or for no hook."""
    attributes, hook = vars(module), hook_of(module)
    if hook is None:
        return None
    if not is_hook(hook, ALIGNING):
        return f"an accelerate hook of another kind, {type(hook).__name__}"
    own = list(chain(module.parameters(recurse=False), module.buffers(recurse=False)))
    if hook.offload or any(tensor.is_meta for tensor in own):
        return "an accelerate hook that loads offloaded weights"
    around, beneath = attributes.get(FORWARD), attributes.get(BENEATH)
    stock = stock_method(module, beneath) or getattr(beneath, "module", None) is module  # or a fast one of accel's
    around = getattr(around, "around", around)  # accelerate's wrapper, where a fast forward stands on it
    if not stock or not isinstance(around, partial) or around.args != (module,):
        return "an accelerate hook around a replaced forward"
    device = execution_device(hook)
    if device is None:
        return "an accelerate hook that names no device"
    if not all(same_place(tensor.device, device) for tensor in own):
        return "an accelerate hook for another device than its weights are on"
    return None


def same_place(found: torch.device, wanted: torch.device) -> bool:
    """Whether both are one device. A CPU is one, whatever its number: tensors on it do not tell."""
    return found == wanted or found.type == wanted.type == "cpu"


def moved_to(value: Any, device: torch.device) -> Any:
    """The value, tuples, lists and dicts too, with its tensors on this device; does not wait for a GPU."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if type(value) is dict:
        found = {name: moved_to(one, device) for name, one in value.items()}
        return value if all(map(is_, found.values(), value.values())) else found
    if type(value) in (tuple, list):
        several = [moved_to(one, device) for one in value]
        return value if all(map(is_, several, value)) else type(value)(several)
    return value
