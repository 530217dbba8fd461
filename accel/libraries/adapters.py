"""What peft leaves on a model: layers around layers, and a mark."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import int8, nn

from accel.libraries.code import comes_from

BASE = "base_layer"  # what an adapter is put around; its own matrices lie beside it
CONFIGS = "peft_config"  # of a model: the settings that its adapters were made by, which no forward of it reads
ADAPTED = "_hf_peft_config_loaded"  # of a model into which transformers has put adapters
DOWN, UP, DROPOUT = "lora_A", "lora_B", "lora_dropout"
ROWS = "adapter_names"  # as a layer is called with, one for each row; BASE_ROW: of a row without
BASE_ROW = "__base__"
ANOTHER = "original_module"  # beside which a layer has whole copies of it, for adapters that train it
VARIANT, SCALES, ACTIVE = "lora_variant", "scaling", "active_adapters"
# Containers of a layer that its forward reads; its hooks before the call aside, by which rows get their adapters.
READ = frozenset((VARIANT, SCALES, "_active_adapter", "merged_adapters", "_modules", "_parameters", "_forward_hooks"))


def low_rank_scales(layer: Any, whole: bool = False) -> dict[str, float] | None:
    """By name, the factors of active low-rank adapters, or `whole` of all; None where it may do anything else."""
    parts = layer._modules
    if any(parts.get(name) is None for name in (DOWN, UP, DROPOUT)) or not hasattr(layer, ACTIVE):
        return None
    if layer.merged:
        return None if layer.disable_adapters or whole else {}  # its next call takes them out of the weight
    names = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in parts[DOWN]]
    names = list(parts[DOWN]._modules) if whole else names
    if any(name in getattr(layer, VARIANT, ()) or drops(parts[DROPOUT][name]) for name in names):
        return None
    return {name: getattr(layer, SCALES)[name] for name in names}


def row_adapters(layer: nn.Module) -> list[str] | None:
    """The adapter of each row, while peft has the layer called with such names and nothing else hangs on it."""
    hooks = layer._forward_pre_hooks.values()
    named = [hook for hook in hooks if isinstance(hook, partial) and set(hook.keywords) == {ROWS}]
    if len(named) != 1 or len(hooks) > 1 or layer._forward_hooks or not comes_from(named[0].func, "peft"):
        return None
    names = named[0].keywords[ROWS]
    return list(names) if isinstance(names, list | tuple) else None


def adds_biases(model: nn.Module) -> bool:
    """Whether an adapter adds numbers of its own, by which zeros do not stay zeros."""
    return any(any(getattr(layer, "lora_bias", {}).values()) for layer in model.modules())


def targeted(model: nn.Module, parameters: Iterable[str]) -> str | None:
    """The first of these parameters, by path, that settings of adapters on a model name."""
    configs = vars(model).get(CONFIGS) or {}
    ends = tuple(f".{one}" for config in configs.values() for one in getattr(config, "target_parameters", None) or ())
    return next((path for path in parameters if f".{path}".endswith(ends)), None)


def readapt(root: Any) -> None:
    """Layers put around ours of bitsandbytes' 8 bits become those that peft has for it: others cannot be merged."""
    lora: Any = sys.modules.get("peft.tuners.lora") if getattr(root, "is_loaded_in_8bit", False) else None
    for layer in () if lora is None else root.modules():
        if type(layer) is lora.Linear and layer.base_layer.weight.dtype == int8:
            layer.__class__ = lora.Linear8bitLt


def base(layer: Any) -> Any:
    """The layer that all adapters are around."""
    while BASE in layer._modules:
        layer = layer._modules[BASE]
    return layer


def outer_modules(root: nn.Module, kinds: tuple[type, ...]) -> Iterator[nn.Module]:
    """It and all modules inside, but for those inside of adapters around one of these kinds: they compute as one."""
    adapted = (one for one in root.modules() if BASE in one._modules and isinstance(base(one), kinds))
    inside = {id(part) for one in adapted for part in one.modules() if part is not one}
    return (one for one in root.modules() if id(one) not in inside)


def unmerge_disabled(model: nn.Module, before: Callable[[], object]) -> None:
    """What is merged and off comes out of the weights now, as in peft's next call, once `before` was called."""
    adapted: Iterator[Any] = (one for one in model.modules() if BASE in one._modules)
    off = (one for one in adapted if getattr(one, "disable_adapters", False))
    if merged := [layer for layer in off if layer.merged]:
        before()
    for layer in merged:
        layer.unmerge()


def own_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer and the modules of its adapters, without those of its base."""
    yield layer
    for name, part in layer._modules.items():
        if name != BASE and part is not None:
            yield from part.modules()


def drops(dropout: Any) -> bool:
    """Whether it changes what it is given."""
    return type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or dropout.training)


def of_adapters(layer: Any, base: Any, downs: Any, ups: Any) -> Any:
    """A layer that computes as this one does, over other modules: its base, and A and B by the names of adapters."""
    twin = copy.copy(layer)
    vars(twin)["_modules"] = {**layer._modules, BASE: base, DOWN: nn.ModuleDict(downs), UP: nn.ModuleDict(ups)}
    return twin
