"""Models whose sequences diffusers divides among ranks, by `enable_parallelism(config=ContextParallelConfig(...))`.

The one file that knows what that leaves on a model: a configuration on the model and on the processors of its
attention, with the mesh of ranks in it, and hooks that split what a module is given and gather what it gives.
"""

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from accel.parallel.ranks import Ranks

HOOKS, WRAPPERS = "diffusers.hooks.context_parallel", "diffusers.hooks.hooks"
KINDS = ("ContextParallelSplitHook", "ContextParallelGatherHook")
UNEVEN = ("ulysses_anything", "ring_anything")  # settings under which ranks hold sequences of different lengths


def context_parallel(holder: object) -> Any:
    """The `ContextParallelConfig` by which sequences of this model, or of an attention's processor, are divided."""
    return getattr(getattr(holder, "_parallel_config", None), "context_parallel_config", None)


def sequence_ranks(config: Any) -> Ranks | None:
    """All ranks that compute one forward together; None where its mesh does not tell them."""
    mesh = getattr(config, "_flattened_mesh", None)
    if mesh is None or not dist.is_available() or not dist.is_initialized():
        return None
    return Ranks.of(mesh.get_group())


def uncapturable(config: Any) -> str | None:
    """Why no forward of a model that is divided so can be captured into CUDA graphs.

    Else all that ranks exchange may be: splitting is a view, an all-to-all and an all-gather of equal parts are
    launches whose results the stream waits for. What makes a capture fail is numbers that the host reads: ranks with
    sequences of different lengths tell each other the lengths, in every attention and as they gather.
    """
    uneven = next((name for name in UNEVEN if getattr(config, name, False)), None)
    if uneven is not None:
        return f"ranks tell each other the lengths of their sequences through the host ({uneven})"
    return None if sequence_ranks(config) is not None else "the ranks that divide its sequences are not known"


def hooks_of(module: nn.Module) -> list:
    """Those that diffusers has put around the module's forward."""
    return list((getattr(vars(module).get("_diffusers_hook"), "hooks", None) or {}).values())


def only_divides(module: nn.Module, config: Any) -> bool:
    """Whether all hooks that diffusers has on a module divide sequences by this configuration: they keep no state, and
    what they do is part of the forward.
    """
    hooks, known = hooks_of(module), vars(sys.modules.get(HOOKS, nn))
    kinds = [known[name] for name in KINDS if name in known]
    return config is not None and all(type(hook) in kinds and hook.parallel_config is config for hook in hooks)


def beneath(module: nn.Module) -> Any:
    """What stands in `vars(module)["forward"]`, or beneath the wrappers of diffusers' hooks there."""
    forward = vars(module).get("forward")
    for reference in reversed(getattr(vars(module).get("_diffusers_hook"), "_fn_refs", ())):
        function = forward.func if isinstance(forward, functools.partial) else None
        if getattr(function, "__globals__", {}).get("__name__") != WRAPPERS:
            break
        forward = reference.forward
    return forward


def waited(tree: Any) -> Any:
    """The tensors that ranks have sent, in the place of those that wait for them when they are read.

    What is gathered of a batch of one is such a view at the end of a forward. A capture may not end before it is there.
    """
    return pytree.tree_map_only(torch.Tensor, lambda one: one.wait() if _waits(one) else one, tree)


def _waits(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "AsyncCollectiveTensor"
