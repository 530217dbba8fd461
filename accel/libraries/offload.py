"""Offload by accelerate and diffusers, taken off a model and put back as it was."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accel.libraries.hooks import ALIGNING, REGISTRY, hook_of, is_hook

GROUPS = "diffusers.hooks.group_offloading"
NAMES = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")  # of its hooks
WHOLE, PARTS = "enable_model_cpu_offload", "enable_sequential_cpu_offload"  # of a pipeline


def lift(model: nn.Module) -> Callable[[], None] | None:
    """Takes offload by parts off the model, whose weights are then on the CPU; gives what puts it back, None for none.

    Raises ValueError where weights are on a disk.
    """
    return _lift_dispatch(model) or _lift_groups(model)


def _lift_dispatch(model: nn.Module) -> Callable[[], None] | None:
    """By accelerate: `device_map` with parts on the CPU, or sequential offload."""
    hooks = [hook_of(module) for module in model.modules()]
    moving = [hook for hook in hooks for one in getattr(hook, "hooks", (hook,)) if is_hook(one, ALIGNING)]
    if not any(getattr(one, "offload", False) for hook in moving for one in getattr(hook, "hooks", (hook,))):
        return None
    import accelerate

    device_map = getattr(model, "hf_device_map", None)
    if device_map is not None and "disk" in device_map.values():
        raise ValueError("some of its weights are on a disk (device_map): load it with RAM for all of them")
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("some of its weights are on a disk, or nowhere: load it with RAM for all of them")
    vars(model).pop("hf_device_map", None)
    if device_map is None:
        return partial(_align_again, model, moving[0])
    return partial(accelerate.dispatch_model, model, device_map, force_hooks=True)


def _align_again(model: nn.Module, hook: Any) -> None:
    import accelerate

    first = next(one for one in getattr(hook, "hooks", (hook,)) if is_hook(one, ALIGNING))
    accelerate.cpu_offload(model, first.execution_device, offload_buffers=bool(model._parameters))


def _lift_groups(model: nn.Module) -> Callable[[], None] | None:
    """By diffusers: `enable_group_offload`."""
    kind = getattr(sys.modules.get(GROUPS), "GroupOffloadingHook", None)
    registries = {module: vars(module)[REGISTRY] for module in model.modules() if REGISTRY in vars(module)}
    held = [hook for one in registries.values() for hook in one.hooks.values() if kind and type(hook) is kind]
    if not held:
        return None
    from diffusers.hooks import apply_group_offloading

    config = held[0].config
    if config.offload_to_disk_path is not None:
        raise ValueError("its weights are on a disk (enable_group_offload): load it with RAM for all of them")
    for registry in registries.values():
        for name in NAMES:
            registry.remove_hook(name, recurse=False)
    model.to("cpu")
    given = {name: value for name, value in vars(config).items() if name not in ("stream", "module_prefix")}
    return partial(apply_group_offloading, model, use_stream=config.stream is not None, **given)
