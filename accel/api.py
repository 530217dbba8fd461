"""The public functions: optimize, restore, report, verify, optimized."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from accel.objects import models_in
from accel.options import parse
from accel.plan import Context, Plan
from accel.quality import Quality, compare
from accel.report import Report

PLAN = "_accel_plan"  # where a model keeps its plan; copies and pickles of the model take it along
VALID = "a diffusers pipeline, a diffusers model, a transformers model, or a transformers pipeline"


def optimize(obj, **options):
    """Makes every later call of obj faster, in place; returns obj.

    obj: a diffusers pipeline (all its models), a diffusers or transformers model, or a transformers pipeline.
    options: the fields of `accel.Options`. Calling it again plans anew, with the new options.
    Raises TypeError for another object or an unknown option, ValueError for a wrong value, or, with strict=True, for a
    site that would be skipped; obj is then as it was.
    """
    chosen = parse(options)
    models = _models(obj)
    before = {name: vars(model).get(PLAN) for name, model in models.items()}
    taken, applied = [], []
    try:
        for name, plan in before.items():
            if plan is not None:
                plan.undo()
                taken.append(name)
        context = Context.create(chosen, _attention_cache())
        for name, model in models.items():
            plan = _plan(model, context)
            plan.apply()
            applied.append(name)
            vars(model)[PLAN] = plan
    except BaseException:
        for name in reversed(applied):
            vars(models[name]).pop(PLAN).undo()
        for name in taken:
            before[name].apply()
            vars(models[name])[PLAN] = before[name]
        raise
    return obj


def restore(obj):
    """Undoes `optimize` exactly: attributes, strides, outputs; returns obj. Does nothing to an object never optimised.

    Raises PatchConflict, changing nothing, where someone replaced a forward on top of ours.
    """
    plans = _plans(obj)
    for plan in plans.values():
        for patch in plan.patches:
            patch.check()
    for plan in plans.values():
        plan.undo()
        vars(plan.root).pop(PLAN)
    return obj


def report(obj) -> Report:
    """What `optimize` did to obj and how calls have gone since; an empty report for an object never optimised."""
    return Report.of(_plans(obj))


@contextmanager
def optimized(obj, **options) -> Iterator:
    """`with accel.optimized(pipe): ...` optimises for the block and restores after it."""
    optimize(obj, **options)
    try:
        yield obj
    finally:
        restore(obj)


def verify(obj, *args, seed: int = 0, **kwargs) -> Quality:
    """Runs obj(*args, **kwargs) optimised and stock, from the same seed, and compares the outputs.

    For a pipeline give what you call it with (verify(pipe, "a prompt", num_inference_steps=20)); for a model, its
    inputs; a UNet2DConditionModel makes its own if none are given. obj is optimised again afterwards, also after an
    error. Raises ValueError for an object that is not optimised.
    """
    plans = _plans(obj)
    if not plans:
        raise ValueError("nothing to verify: this object is not optimised; call accel.optimize(obj) first")
    if not args and not kwargs:
        args, kwargs = _example_call(obj)
    ours = _call(obj, args, kwargs, seed)
    undone = []
    try:
        for plan in plans.values():
            plan.undo()
            undone.append(plan)
        stock = _call(obj, args, kwargs, seed)
    finally:
        for plan in undone:
            plan.apply()
    return compare(stock, ours)


def _plan(model: nn.Module, context: Context) -> Plan:
    from accel.diffusion.family import RULES, graph_paths

    context.graph_paths = graph_paths(model)
    return Plan(model, RULES, context)


def _models(obj) -> dict[str, nn.Module]:
    found = models_in(obj)
    if found is None:
        raise TypeError(f"accel cannot optimise a {type(obj).__module__}.{type(obj).__name__}; give {VALID}")
    unique = {id(model): name for name, model in reversed(found.items())}
    return {name: model for name, model in found.items() if unique[id(model)] == name}


def _plans(obj) -> dict[str, Plan]:
    return {name: vars(model)[PLAN] for name, model in _models(obj).items() if PLAN in vars(model)}


def _call(obj, args, kwargs, seed: int):
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.manual_seed(seed)
        return obj(*args, **kwargs)


def _example_call(obj) -> tuple[tuple, dict]:
    from accel.diffusion.inputs import example_inputs

    return (), example_inputs(obj)


def _attention_cache() -> Path | None:
    """Where attention choices are kept: one file a GPU and set of versions, below ACCEL_CACHE_DIR or ~/.cache/accel."""
    if not torch.cuda.is_available():
        return None
    folder = os.environ.get("ACCEL_CACHE_DIR") or Path.home() / ".cache" / "accel"
    name = f"{torch.cuda.get_device_name()}-torch{torch.__version__}-cudnn{torch.backends.cudnn.version()}"
    return Path(folder) / ("attention-" + "".join(c if c.isalnum() or c in ".-" else "_" for c in name) + ".json")
