"""Hooks of accelerate and diffusers around a module's forward: where they are kept, and the forward beneath them.

accelerate keeps one hook on a module, and a wrapper in place of its forward; diffusers a registry of hooks, with a
reference to what each calls. Neither library is imported here: where it was not, there is no hook of it.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

HOOK, BENEATH, FORWARD = "_hf_hook", "_old_forward", "forward"  # what accelerate puts on a module
HOOKS = "_all_hooks"  # where a pipeline keeps those that it has put on its models
REGISTRY = "_diffusers_hook"
WRAPPERS = "diffusers.hooks.hooks"  # where the functions are written that diffusers puts in a forward's place
CASTS, CASTING, KEEPING = "diffusers.hooks.layerwise_casting", "LayerwiseCastingHook", "PeftInputAutocastDisableHook"
DIVIDING = "diffusers.hooks.context_parallel", ("ContextParallelSplitHook", "ContextParallelGatherHook")
ALIGNING, OFFLOADING = "AlignDevicesHook", "CpuOffload"  # accelerate's: to where weights lie; of a whole model
GROUPS = "diffusers.hooks.group_offloading"
NAMES = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")  # of its hooks
METHODS = ENTER, LEAVE, DETACH = "pre_forward", "init_hook", "detach_hook"  # of a hook that moves a whole model


def forward_slots(module: nn.Module) -> list[tuple[dict, str]]:
    """(attributes, name) of all places where hooks may keep a forward of the module; its own is the first."""
    attributes = vars(module)
    kept = [(vars(one), name) for one in references(module) for name in (FORWARD, "original_forward")]
    return [(attributes, FORWARD), (attributes, BENEATH), *kept]


def hook_of(module: nn.Module) -> Any:
    """accelerate's hook on a module; None without one."""
    return vars(module).get(HOOK)


def is_hook(hook: object, name: str) -> bool:
    """Whether it is exactly this hook of accelerate's, and no subclass."""
    kind = getattr(sys.modules.get("accelerate.hooks"), name, None)
    return kind is not None and type(hook) is kind


def why_elsewhere(module: nn.Module) -> str | None:
    """Why weights are not where a forward that reads them finds them. A hook of the whole module has run by then."""
    hooks = ((path, hook_of(one)) for path, one in module.named_modules())
    moved = (path for path, hook in hooks if hook is not None and (path or not is_hook(hook, OFFLOADING)))
    if (path := next(moved, None)) is not None:
        return f"an accelerate hook on {path or 'the model'}"
    parameters = list(module.parameters())
    if len({p.device for p in parameters}) > 1 or any(p.is_meta for p in parameters):
        return "weights on several devices, or not loaded"
    return None


def execution_device(hook: Any) -> torch.device | None:
    """Where accelerate's hook brings what its module is called with; None where it names no device."""
    given = hook.execution_device
    if given is None:
        return None
    if isinstance(given, int):
        return torch.device("cuda", given)
    device = torch.device(given)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def offload_hooks(pipe: Any, devices: tuple[str, ...]) -> Iterator[tuple[nn.Module, Any]]:
    """(model, hook) of those by which accelerate moves whole models of a pipeline to a device of these kinds."""
    hooks, last = list(getattr(pipe, HOOKS, None) or ()), getattr(pipe, "final_offload_hook", None)
    while last is not None:  # of a chain, which is all that a pipeline with code of its own for it keeps
        hooks, last = [*hooks, last], last.hook.prev_module_hook
    for user_hook in hooks:
        model, hook = getattr(user_hook, "model", None), getattr(user_hook, "hook", None)
        if not isinstance(model, nn.Module) or hook_of(model) is not hook or not is_hook(hook, OFFLOADING):
            continue
        if isinstance(hook.execution_device, torch.device) and hook.execution_device.type in devices:
            yield model, hook


def remove_hooks(model: nn.Module) -> None:
    """Those that accelerate has on a model and on all in it."""
    import accelerate

    accelerate.hooks.remove_hook_from_module(model, recurse=True)


def hooks_of(module: nn.Module) -> list:
    """Those that diffusers has put around the module's forward."""
    return list((getattr(vars(module).get(REGISTRY), "hooks", None) or {}).values())


def references(module: nn.Module) -> Any:
    """What diffusers' hooks on the module go around, the innermost first."""
    return getattr(vars(module).get(REGISTRY), "_fn_refs", ())


def skips(module: nn.Module) -> bool:
    """Whether a hook of diffusers decides itself what runs in the module's place."""
    return any(reference.original_forward is not None for reference in references(module))


def beneath(module: nn.Module) -> Any:
    """What stands in `vars(module)["forward"]`, or beneath the wrappers of diffusers' hooks there."""
    forward = vars(module).get(FORWARD)
    for reference in reversed(references(module)):
        if _wrapper(forward) is None:
            break
        forward = reference.original_forward or reference.forward
    return forward


def casting_hook(module: nn.Module, name: str = CASTING) -> tuple[Any, Any] | None:
    """(hook, reference) where a module's only hook of diffusers casts its weights around each call, and all that stands
    around its forward is that. name: or another hook of casting: `KEEPING` has peft not cast inputs to stored weights.
    """
    kind, hooks = getattr(sys.modules.get(CASTS), name, None), hooks_of(module)
    if kind is None or len(hooks) != 1 or len(references(module)) != 1 or type(hooks[0]) is not kind:
        return None
    reference = references(module)[0]
    inside = [cell.cell_contents for cell in getattr(_wrapper(vars(module).get(FORWARD)), "__closure__", None) or ()]
    return (hooks[0], reference) if any(one is reference for one in inside) else None


def only_divides(module: nn.Module, config: Any) -> bool:
    """Whether all hooks of diffusers on a module divide sequences by this configuration; these keep no state."""
    known = vars(sys.modules.get(DIVIDING[0], nn))
    kinds = [known[name] for name in DIVIDING[1] if name in known]
    return config is not None and all(type(one) in kinds and one.parallel_config is config for one in hooks_of(module))


def _wrapper(forward: Any) -> Any:
    """The function of diffusers that calls a hook in the place of a forward; None for anything else."""
    function = forward.func if isinstance(forward, functools.partial) else None
    return function if getattr(function, "__globals__", {}).get("__name__") == WRAPPERS else None


def is_offloaded(model: nn.Module) -> bool:
    """Whether stock moves it, or parts of it, to where they are called."""
    hooks = [one for hook in map(hook_of, model.modules()) for one in getattr(hook, "hooks", (hook,))]
    return in_groups(model) or any(is_hook(one, name) for one in hooks for name in (ALIGNING, OFFLOADING))


def lift(model: nn.Module) -> Callable[[], None] | None:
    """Takes offload by parts off the model, whose weights are then on the CPU; gives what puts it back, None for none.

    Raises ValueError where weights are on a disk.
    """
    if grouped_on_disk(model):
        raise ValueError("its weights are on a disk (enable_group_offload): load it with RAM for all of them")
    return _lift_dispatch(model) or _lift_groups(model)


def _lift_dispatch(model: nn.Module) -> Callable[[], None] | None:
    """By accelerate: `device_map` with parts on the CPU, or sequential offload."""
    hooks = [one for hook in map(hook_of, model.modules()) for one in getattr(hook, "hooks", (hook,))]
    held = [one for one in hooks if is_hook(one, ALIGNING)]
    if not held:  # hooks that move no weights are taken off too: a stretch of layers is not called one by one
        return None
    import accelerate

    device_map = getattr(model, "hf_device_map", None)
    if any(map(_not_in_ram, held)) or "disk" in (device_map or {}).values():
        raise ValueError("some of its weights are on a disk, or nowhere: load it with RAM for all of them")
    if any(hook_of(one) is not None and _wrapper(vars(one).get(FORWARD)) is not None for one in model.modules()):
        # accelerate puts the forward back that it found, without what was put around it since.
        raise ValueError(
            "hooks of diffusers, such as casts, lie over its offload: put those on first, or leave one off"
        )
    remove_hooks(model)
    vars(model).pop("hf_device_map", None)
    moving = next((one for one in held if one.offload), held[0])  # the model's own only brings results back
    given: dict[str, Any] = {"offload_buffers": moving.offload_buffers}
    if device_map is None:
        return partial(accelerate.cpu_offload, model, moving.execution_device, **given)
    return partial(accelerate.dispatch_model, model, device_map, skip_keys=moving.skip_keys, force_hooks=True, **given)


def _not_in_ram(hook: Any) -> bool:
    """Whether weights would not come back where the hook is taken off, or would be read from files."""
    files = getattr(getattr(hook.weights_map, "dataset", None), "index", None)
    return bool(files) or torch.device("meta") in getattr(hook, "original_devices", {}).values()


def _group_hooks(model: nn.Module) -> list:
    kind = getattr(sys.modules.get(GROUPS), "GroupOffloadingHook", None)
    return [hook for module in model.modules() for hook in hooks_of(module) if kind and type(hook) is kind]


def in_groups(model: nn.Module) -> bool:
    """Whether diffusers' group offload brings its weights part by part: what comes next may be on its way already."""
    return bool(_group_hooks(model))


def grouped_on_disk(model: nn.Module) -> bool:
    """Whether diffusers' group offload reads its weights from files, each for its call."""
    return any(hook.config.offload_to_disk_path is not None for hook in _group_hooks(model))


def _lift_groups(model: nn.Module) -> Callable[[], None] | None:
    """By diffusers: `enable_group_offload`."""
    held = _group_hooks(model)
    if not held:
        return None
    from diffusers.hooks import apply_group_offloading

    config = held[0].config
    for registry in (vars(module)[REGISTRY] for module in model.modules() if REGISTRY in vars(module)):
        for name in NAMES:
            registry.remove_hook(name, recurse=False)
    model.to("cpu")
    given = {name: value for name, value in vars(config).items() if name not in ("stream", "module_prefix")}
    return partial(apply_group_offloading, model, use_stream=config.stream is not None, **given)
