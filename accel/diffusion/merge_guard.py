"""What a model with quantized linears says to those who would write its weights: to a file, or into one another."""

from typing import Any

from torch import nn

from accel.diffusion.save_override import SAVE, DenoiserSaveOverride
from accel.patching.patch import Patch

MERGING = ("fuse_lora", "fuse_qkv_projections")  # methods that make new weights of the old ones


class MergeGuard:
    """A patch: the model's methods that stand for as long as its linears are quantized. See `QuantizedModulePatch`."""

    def __init__(self, model: nn.Module):
        methods = {SAVE: DenoiserSaveOverride(model)} | {
            name: Refusal(f"{type(model).__name__}.{name}") for name in MERGING
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


class Refusal:
    """Stands in the place of a method that merges weights: refused as a whole, before some are merged."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"{self.name}: quantized weights cannot be merged, with adapters or with one another; "
            "call accel.restore, merge, and call accel.optimize again"
        )
