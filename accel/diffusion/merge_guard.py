"""What a model with quantized linears says to those who would write its weights: to a file, or into one another."""

import copy
import warnings
from typing import Any

import torch
from torch import nn

from accel.patching.owner import InstanceMethod
from accel.patching.rule import Patch
from accel.quantization.module import QuantizedLinear

SAVE, STATE = "save_pretrained", "state_dict"


class DenoiserSaveOverride(InstanceMethod):
    """Stands in `vars(model)["save_pretrained"]` while linears are quantized; takes what the model's own takes.

    Every quantized weight is written as the numbers stand for, in the dtype it had, which a warning says.
    """

    name, shared = SAVE, True

    def __init__(self, model: nn.Module):
        self.model = model

    @property
    def owner(self) -> nn.Module:
        return self.model

    def call(self, *args: Any, **kwargs: Any) -> None:
        model = self.model
        warnings.warn(
            f"{type(model).__name__}.save_pretrained: quantized weights are written out in the model's dtype, rounded "
            "as they are, not in fewer bits; to save the original weights, call accel.restore first",
            stacklevel=3,
        )
        twin = copy.copy(model)  # shares all but what it says is in it
        vars(twin).pop(SAVE, None)
        vars(twin)[STATE] = DequantizedState(model)
        getattr(type(model), SAVE)(twin, *args, **kwargs)


class DequantizedState:
    """The state_dict of a model, with weights in place of what quantized linears hold."""

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        names = self.model.state_dict(*args, **kwargs)
        for path, module in self.model.named_modules(remove_duplicate=False):
            if type(module) is not QuantizedLinear or f"{path}.scales" not in names:
                continue
            parts = (names.pop(f"{path}.{name}", None) for name in ("data", "scales", "zeros"))
            names[f"{path}.weight"] = module.read(*parts).dequantized(module.dtype)
        return names


MERGING = ("fuse_lora", "fuse_qkv_projections")  # methods that make new weights of the old ones


class MergeGuard:
    """A patch: the model's methods that stand for as long as its linears are quantized. See `QuantizedModulePatch`."""

    def __init__(self, model: nn.Module):
        methods = {SAVE: DenoiserSaveOverride(model)} | {
            name: MergeRefusal(f"{type(model).__name__}.{name}") for name in MERGING
        }
        here = {name: method for name, method in methods.items() if hasattr(model, name) and name not in vars(model)}
        self.patches = [Patch(model, name, method) for name, method in here.items()]

    def apply(self) -> None:
        for patch in self.patches:
            patch.apply()

    def check(self) -> None:
        for patch in self.patches:
            patch.check()

    def undo(self) -> None:
        for patch in self.patches:
            patch.undo()


class MergeRefusal:
    """Stands in the place of a method that merges weights: refused as a whole, before some are merged."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{self.name}: quantized weights cannot be merged, with adapters or with one another; "
            "call accel.restore, merge, and call accel.optimize again"
        )
