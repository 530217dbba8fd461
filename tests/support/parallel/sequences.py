"""Transformers that diffusers divides along the sequence, stock and optimized. Run by `support.ranks.RankPool`."""

import copy
from typing import Any

import torch

import accel
from support.parallel.diffusion_ranks import fallbacks


def model_and_inputs(name: str) -> tuple[Any, dict]:
    """A tiny transformer of this class, and what two ranks can divide."""
    from support.compatibility import diffusers_calls, tiny_diffusers_models

    torch.manual_seed(0)
    model = tiny_diffusers_models.build(name)
    torch.manual_seed(1)
    given = diffusers_calls.inputs(model).items()
    return model, {key: even(value) for key, value in given} | {"return_dict": False}


def divided(model: Any, **options: Any) -> Any:
    """The model, which diffusers divides along the sequence."""
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1  # which diffusers divides by; a CPU counts none
    torch.accelerator.current_accelerator = lambda: None  # a CUDA build names a card that is not there
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, **options))
    return model


def both(model: Any, order: str, options: dict, **division: Any) -> Any:
    """A copy optimized and divided, in this order. options: of accel.optimize."""
    ours = copy.deepcopy(model)
    if order == "optimized first":
        return divided(accel.optimize(ours, cpu="fuse", **options), **division)
    return accel.optimize(divided(ours, **division), cpu="fuse", **options)


def plans_of(model: Any) -> tuple[int, list[bool]]:
    """How many blocks have forwards of ours, and of each of their plans whether it is run."""
    from accel.diffusion.dit.block import BlockForward

    forwards = [forward for forward in map(beneath, model.modules()) if isinstance(forward, BlockForward)]
    plans = [plan for forward in forwards for plan in (forward.known or {}).values()]
    return len(forwards), [plan.executable is not None and plan.compared for plan in plans]


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def sequence(name: str, anything: bool) -> dict[str, Any]:
    """A transformer that diffusers divides along the sequence, before and after it is optimized."""
    model, given = model_and_inputs(name)
    whole = model(**given)[0]
    wanted = divided(copy.deepcopy(model), ulysses_anything=anything)(**given)[0]
    found: dict[str, Any] = {"stock": off(wanted, whole)}
    for order in ("optimized first", "divided first"):
        ours = both(model, order, {}, ulysses_anything=anything)
        furthest = max(off(ours(**given)[0], wanted) for _ in range(3))
        _, ran = plans_of(ours)
        told = fallbacks(ours)
        accel.restore(ours)
        found[order] = furthest, ran, told, torch.equal(ours(**given)[0], wanted)
    return found


def beneath(module: Any) -> Any:
    """The forward that hooks of diffusers go around."""
    references = getattr(vars(module).get("_diffusers_hook"), "_fn_refs", ())
    return references[0].forward if references else vars(module).get("forward")


def even(value: Any) -> Any:
    """Texts of seven tokens get an eighth, which two ranks can divide."""
    if not isinstance(value, torch.Tensor) or 7 not in value.shape:
        return value
    dim = value.shape.index(7)
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)
