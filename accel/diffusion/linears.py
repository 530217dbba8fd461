"""Which models denoise, which of their linear layers are quantized, and why not the others."""

import inspect
from typing import NamedTuple

import torch
from torch import nn

from accel.diffusion.sensitive_linears import sensitive_linears, transformer_blocks
from accel.libraries.adapters import BASE
from accel.patching.structure import holds, plain
from accel.quantization.activations import kind_of
from accel.quantization.linears import inside, unfit
from accel.quantization.module import QuantizedLinear
from accel.quantization.scheme import Scheme

TIME = "timestep"
TIMES = ("t",)  # other names of it
UNIT = 16  # numbers of 8 bits that tensor cores take at once


def denoises(model: object) -> bool:
    """Whether it is called at every step of a loop: UNets, transformers over latents, ControlNets are told the time."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        return False
    return any(name.startswith(TIME) or name in TIMES for name in inspect.signature(type(model).forward).parameters)


class DenoiserLinears(NamedTuple):
    """By path: those that are quantized, why others cannot be, and why others are not to be."""

    chosen: dict[str, nn.Linear]
    skipped: dict[str, str]
    kept: dict[str, str]


def denoiser_linears(model: nn.Module, scheme: Scheme) -> DenoiserLinears:
    """The linear layers inside the model's parts; see `sensitive_linears` for those that are kept. What hangs on a UNet
    itself is left alone.
    """
    chosen, skipped, kept = {}, {}, {}
    sensitive = sensitive_linears(model)
    for path, module in inside(model, "", set()):
        if not isinstance(module, nn.Linear):
            continue
        if module in sensitive and type(module) is not QuantizedLinear:
            kept[path] = sensitive[module]
            continue
        if len([name for name in path.split(".") if name != BASE]) < 2:
            continue
        reason = _refuses(module, scheme)
        if reason is None:
            chosen[path] = module
        else:
            skipped[path] = reason
    return DenoiserLinears(chosen, skipped, kept)


def prompt_projections(model: nn.Module) -> set[nn.Module]:
    """Keys' and values' projections of a UNet's cross-attention, in an adapter or out of it.

    They read a prompt, tens of rows that stay the same through a loop, in which they are computed once.
    """
    if transformer_blocks(model):  # there they are computed in every step
        return set()
    crossing = (m for m in model.modules() if getattr(m, "is_cross_attention", False) and holds(m, "to_k", "to_v"))
    return {part for m in crossing for name in ("to_k", "to_v") for part in m.get_submodule(name).modules()}


def refuses_rounding(module: QuantizedLinear, activations: str) -> str | None:
    """Why the products of this linear would not run in 8 bits."""
    sizes = {"inputs": module.in_features}
    if kind_of(activations) == "fp8":
        if module.dtype == torch.float16:
            return "in float16, while scaled products of float8 give bfloat16"
        sizes["outputs"] = module.out_features
    odd = [f"{size} {name}, not a multiple of {UNIT}" for name, size in sizes.items() if size % UNIT]
    return odd[0] if odd else None


def _refuses(module: nn.Linear, scheme: Scheme) -> str | None:
    if type(module) is QuantizedLinear:
        return f"is {module.scheme} already"
    reason = plain(module, nn.Linear)
    if reason is not None:
        return reason
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
        return "its weight is not loaded, or of a type of its own"
    outputs, inputs = weight.shape
    return unfit(outputs, inputs, scheme)
