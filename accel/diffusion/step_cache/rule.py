"""Where the step cache fits: UNets whose up blocks take one skip connection a layer, transformers, and their blocks."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from accel.cuda_graphs.rule import GraphForward
from accel.diffusion.blocks.up_block import up_block_example
from accel.diffusion.step_cache.blocks import DeepBlock, LastUpBlock, StackBlock
from accel.diffusion.step_cache.cache import StepCacheForward, StepCacheState
from accel.diffusion.step_cache.stack import BlockStack
from accel.diffusion.step_cache.tracks import StepArguments
from accel.fusion.loop import DenoisingLoop
from accel.patching.probe import Probe
from accel.patching.rule import Context, ForwardPatch, Match, Rule, Site, Skip, first_of
from accel.patching.structure import holds, meta_weights, untouched

# Prompts of a UNet are the same tensors in every step of a loop.
UNET = StepArguments("sample", "timestep", ("encoder_hidden_states", "class_labels", "added_cond_kwargs"))


def match_step_cache(site: Site, context: Context, beneath: Sequence[Rule]) -> Match | Skip | None:
    """The root of a denoiser, then its blocks. Each keeps the forward that the rules `beneath` give it in this one."""
    wanted, m = context.options.step_cache, site.module
    if wanted is None:
        return None
    if site.path:
        root = context.find(StepCacheForward)
        return None if root is None or site.path not in root.paths else _match_block(site, context, beneath, root)
    stacks: tuple[BlockStack, ...] = ()
    if holds(m, "conv_in", "down_blocks", "up_blocks", "conv_out"):
        arguments = UNET
        paths = tuple(path for path, _ in _blocks(m))
        reason = _unlike(m) or _in_two_parts(m, context)
    else:
        found = transformer_arguments(m) if any(map(_are_blocks, m.children())) else None
        if found is None:
            return None
        arguments, stacks = found, stacks_of(m)
        paths = tuple(stack.path(index) for stack in stacks for index in range(stack.size))
        reason = _whole(m, paths)
    if reason is not None:
        return Skip(reason)
    # For a quality the interval is found once everything is patched.
    state = StepCacheState(context.of(DenoisingLoop), wanted if isinstance(wanted, int) else 1, arguments)
    shared: dict[str, Any] = {"state": state, "paths": paths, "stacks": stacks}
    root = StepCacheForward(m, site.path, context.kernels, context.log, **shared)
    inner = first_of(beneath, site, context)
    if isinstance(inner, Skip):
        return inner
    root.inner, root.told = inner.forward, inner.note
    if isinstance(root.inner, GraphForward):
        root.inner.variant = state.variant
    context.put(root)
    return Match(root, inner.patches, covers=(), note=root.note())


def _in_two_parts(m: nn.Module, context: Context) -> str | None:
    """Why the last up block of a UNet cannot be computed up to its last layer, and from there."""
    path, block = _blocks(m)[-1]
    state = StepCacheState(DenoisingLoop(), 1, UNET)
    last = LastUpBlock(block, path, context.kernels, context.log, state=state, inner=None)
    # A probe of its own: the shared one takes a verdict on a block for all that may be asked about it.
    reason = Probe().disagreement(block, last.in_two_parts, (), up_block_example(block))
    return None if reason is None else f"{path} in two parts: {reason}"


def _whole(m: nn.Module, paths: Sequence[str]) -> str | None:
    """Why a transformer is to run whole in every call."""
    if gives_blocks(m):
        return "it gives what each of its blocks gives, as a ControlNet does: it runs whole in every call"
    if not paths:
        return "a single block in each list"
    if meta_weights(m):
        return "weights are not loaded (meta device)"
    return untouched(*map(m.get_submodule, paths))


def _match_block(site: Site, context: Context, beneath: Sequence[Rule], root: StepCacheForward) -> Match | Skip:
    inner = first_of(beneath, site, context)
    if isinstance(inner, Skip):
        return inner
    place: tuple = (site.module, site.path, context.kernels, context.log)
    shared: dict[str, Any] = {"state": root.state, "inner": inner.forward}
    stack = next((one for one in root.stacks if site.path.rpartition(".")[0] == one.name), None)
    block: DeepBlock | StackBlock
    if stack is not None:
        block = StackBlock(*place, **shared, stack=stack)
        note = "runs in whole calls" if block.index >= stack.kept else "runs in every call"
    elif site.path == root.paths[-1]:
        block, note = LastUpBlock(*place, **shared), "its last layer runs in every call"
    else:
        block, note = DeepBlock(*place, **shared), "runs in whole calls"
    root.blocks[site.path] = ForwardPatch(site.module, block)
    told = "; ".join(filter(None, (note, inner.note)))
    return Match(block, inner.patches, covers=inner.covers, note=told, inside=inner.inside)


def _blocks(m: Any) -> list[tuple[str, nn.Module]]:
    """Down blocks, the middle, up blocks, by path."""
    down, up = ([(f"{name}.{i}", b) for i, b in enumerate(getattr(m, name))] for name in ("down_blocks", "up_blocks"))
    middle = getattr(m, "mid_block", None)
    return down + ([] if middle is None else [("mid_block", middle)]) + up


def _unlike(m: Any) -> str | None:
    """Why this is no UNet of the kind whose up blocks take one skip connection a layer, conv_in's last of all."""
    for path, block in _blocks(m):
        if not len(getattr(block, "resnets", ())):
            return f"{path} has no resnets: a UNet of another kind"
        if hasattr(block, "skip_conv"):
            return f"{path} keeps an image beside the features: a UNet of another kind"
    given = 1 + sum(len(block.resnets) + bool(getattr(block, "downsamplers", None)) for block in m.down_blocks)
    taken = sum(len(block.resnets) for block in m.up_blocks)
    if given != taken:
        return f"{given} skip connections for {taken} layers: a UNet of another kind"
    layers = m.up_blocks[-1].resnets
    if len(layers) < 2:
        return "a single layer in the last up block"
    if not all(hasattr(layer, name) for layer in layers for name in ("in_channels", "out_channels", "time_emb_proj")):
        return "resnets of another make in the last up block"
    if meta_weights(m):
        return "weights are not loaded (meta device)"
    return untouched(*(block for _, block in _blocks(m)))


TIMESTEPS = ("timestep", "timesteps", "t")  # names under which transformers take it
LEAST_LINEARS = 2  # that a block has at least
SHORT_LIST = 2  # so many blocks refine what goes into a longer list


def transformer_arguments(model: nn.Module) -> StepArguments | None:
    """Which arguments say what; None where it takes no timestep."""
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD][1:]
    timestep = next((name for name in TIMESTEPS if name in names), None)
    if timestep is None or names[0] == timestep:
        return None
    moving = {name for name in names[1:] if "timestep" in name or "sigma" in name or name == timestep}
    others = tuple(name for name in names[1:] if _sample(name))
    conditions = tuple(name for name in names[1:] if name not in moving and name not in others)
    return StepArguments(names[0], timestep, conditions, others, reads=True)


def _sample(name: str) -> bool:
    """Whether an argument of this name is noisy too, as the sound of a video; prompts are `encoder_hidden_states`."""
    return name.endswith("hidden_states") and "encoder" not in name and "control" not in name


def stacks_of(model: nn.Module) -> tuple[BlockStack, ...]:
    """Its lists of blocks, but for short ones beside longer ones, which are left to run. The first block of all that
    remain runs in every call too. Empty where no list has two blocks.
    """
    sizes = {name: len(list(child.children())) for name, child in model.named_children() if _are_blocks(child)}
    longest = max(sizes.values(), default=0)
    names = [name for name, size in sizes.items() if size > SHORT_LIST or size == longest > 1]
    return tuple(BlockStack(name, sizes[name], int(name == names[0])) for name in names)


def gives_blocks(model: nn.Module) -> bool:
    """Whether what each block gives is projected by a linear of its own, as a ControlNet does."""
    lists = (child for child in model.children() if isinstance(child, nn.ModuleList) and len(child))
    return any(all(type(one) is nn.Linear for one in each) for each in lists)


def _are_blocks(child: nn.Module) -> bool:
    """A list of modules, each with products and no norm over groups, as UNets' have."""
    return isinstance(child, nn.ModuleList) and len(child) > 0 and all(map(_is_block, child))


def _is_block(module: nn.Module) -> bool:
    parts = list(module.modules())
    return len(parts) > LEAST_LINEARS and sum(hasattr(part, "in_features") for part in parts) >= LEAST_LINEARS
