"""Which models denoise, which of their linear layers are quantized, and why not the others."""

import inspect
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from accel.diffusion.dit.block import innermost_blocks
from accel.libraries.adapters import BASE
from accel.patching.structure import holds, plain
from accel.quantization.activations import weight_dtype_of
from accel.quantization.linears import already, base_modules, size_reason
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
    """The linear layers inside the model's parts, but not its direct children; see `sensitive_linears`."""
    chosen, skipped, kept = {}, {}, {}
    sensitive = sensitive_linears(model)
    for path, module in base_modules(model, "", set()):
        if not isinstance(module, nn.Linear):
            continue
        if module in sensitive and already(module) is None and module.weight.is_floating_point():
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


def projected_together(model: nn.Module) -> set[nn.Module]:
    """What fused blocks of a UNet compute at once for all of them: projections of its time, and of its prompt."""
    found = prompt_projections(model)
    for m in model.modules():
        if holds(m, "norm1", "conv1", "norm2", "conv2", "time_emb_proj"):
            conv, times = m.get_submodule("conv1"), m.get_submodule("time_emb_proj")
            if isinstance(conv, nn.Conv2d) and conv.out_channels == getattr(times, "out_features", None):
                found.add(times)
    return found


def refuses_rounding(module: QuantizedLinear, activations: str) -> str | None:
    """Why the products of this linear would not run in 8 bits."""
    sizes = {"inputs": module.in_features}
    if weight_dtype_of(activations) == "fp8":
        if module.dtype == torch.float16:
            return "in float16, while scaled products of float8 give bfloat16"
        sizes["outputs"] = module.out_features
    odd = [f"{size} {name}, not a multiple of {UNIT}" for name, size in sizes.items() if size % UNIT]
    return odd[0] if odd else None


def _refuses(module: nn.Linear, scheme: Scheme) -> str | None:
    if (reason := already(module) or plain(module, nn.Linear)) is not None:
        return reason
    weight = module._parameters.get("weight")
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.is_meta:
        return "its weight is not loaded, or of a type of its own"
    outputs, inputs = weight.shape
    return size_reason(outputs, inputs, scheme)


MODULATES = "stays in 16 bits: it modulates its block, one row for all tokens of an image"
OUTSIDE = "stays in 16 bits: it is in no block, and embeds, modulates or projects the latents"


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """By path, lists of nothing but blocks; none of a UNet, whose lists hold resnet blocks and convolutions too."""
    if any(isinstance(module, nn.GroupNorm) for module in model.modules()):
        return {}
    blocks = dict(innermost_blocks(model))
    lists = {path.rpartition(".")[0] for path in blocks}
    mixed = (child not in blocks.values() for path in lists for child in model.get_submodule(path).children())
    return {} if any(mixed) else blocks


def sensitive_linears(model: nn.Module) -> dict[nn.Module, str]:
    """Those of a diffusion transformer, and why. None of another model."""
    blocks = transformer_blocks(model)
    if not blocks:
        return {}
    within = {part for block in blocks.values() for part in block.modules()}
    found: dict[nn.Module, str] = {linear: OUTSIDE for linear in _linears(model) if linear not in within}
    for block in blocks.values():
        found |= dict.fromkeys(modulations(block), MODULATES)
    return found


def modulations(block: nn.Module) -> list[nn.Linear]:
    """The linears of a block that make its scales, shifts and gates: what lies beside its attentions, and is no
    feed-forward. A part in which attentions lie is looked into.

    A modulation is a part whose last linear is its only one, or gives more than any before it and not as much as the
    first takes. A feed-forward, and an attention whose code is its own, give back what they take. A linear of the block
    itself modulates where it neither takes nor gives vectors as wide as those that the first attention takes.
    """
    attention = next((part for part in block.modules() if _attends(part)), None)
    width = None if attention is None else next((one.in_features for one in _linears(attention)), None)
    found: list[nn.Linear] = []
    parts = [] if attention is block else list(block.children())
    while parts:
        part = parts.pop(0)
        linears = list(_linears(part))
        if isinstance(part, nn.Linear) or BASE in part._modules:  # an adapter's too
            found += [one for one in linears if width not in (None, one.in_features, one.out_features)]
        elif not any(map(_attends, part.modules())):
            found += linears if _makes_several(linears) else []
        elif not _attends(part):
            parts += part.children()
    return found


def _makes_several(linears: list[nn.Linear]) -> bool:
    if len(linears) < 2:
        return True
    *before, last = linears
    return last.out_features > max(one.out_features for one in before) and last.out_features != linears[0].in_features


def _attends(module: nn.Module) -> bool:
    return "processor" in vars(module)


def _linears(module: nn.Module) -> Iterator[nn.Linear]:
    """Without those of adapters."""
    return (part for _, part in base_modules(module, "", set()) if isinstance(part, nn.Linear))
