"""Where the step cache fits a diffusion transformer: lists of blocks that its forward goes through one after the other.

What the blocks' rows are shows in the first call, see `stack.py`; here only the make of the model is looked at.
"""

import inspect

from torch import nn

from accel.diffusion.step_cache.arguments import StepArguments
from accel.diffusion.step_cache.stack import Stack

TIMESTEPS = ("timestep", "timesteps", "t")  # names under which transformers take it
LINEARS = 2  # that a block has at least
FEW = 2  # so many blocks refine what goes into a longer list


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


def stacks_of(model: nn.Module) -> tuple[Stack, ...]:
    """Its lists of blocks, but for short ones beside longer ones, which are left to run. The first block of all that
    remain runs in every call too. Empty where no list has two blocks.
    """
    sizes = {name: len(list(child.children())) for name, child in model.named_children() if _are_blocks(child)}
    longest = max(sizes.values(), default=0)
    names = [name for name, size in sizes.items() if size > FEW or size == longest > 1]
    return tuple(Stack(name, sizes[name], int(name == names[0])) for name in names)


def lists_blocks(model: nn.Module) -> bool:
    return any(map(_are_blocks, model.children()))


def gives_blocks(model: nn.Module) -> bool:
    """Whether what each block gives is projected by a linear of its own, as a ControlNet does."""
    lists = (child for child in model.children() if isinstance(child, nn.ModuleList) and len(child))
    return any(all(type(one) is nn.Linear for one in each) for each in lists)


def _are_blocks(child: nn.Module) -> bool:
    """A list of modules, each with products and no norm over groups, as UNets' have."""
    return isinstance(child, nn.ModuleList) and len(child) > 0 and all(map(_is_block, child))


def _is_block(module: nn.Module) -> bool:
    parts = list(module.modules())
    return len(parts) > LINEARS and sum(hasattr(part, "in_features") for part in parts) >= LINEARS
