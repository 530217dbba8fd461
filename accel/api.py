"""The public functions: optimize, restore, report, verify, optimized."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
from accel_kernels.warmup import prepare
from torch import nn

from accel.families import divides, example_of, is_language_model, keeps_keys, note_denoiser, plan_for, takes_weights
from accel.in_flight import alone, others_run_stock
from accel.libraries.versions import newer_than_tested
from accel.offload.hooks import release_forsaken
from accel.options import Activations, Attention, Cpu, KvCache, Layout, Options, Padding, Parallel, choose
from accel.parallel.ranks import world
from accel.patching.owner import disown_inside
from accel.patching.rule import Context
from accel.planning import targets, whole_models
from accel.planning.memory import examining, note_turns
from accel.planning.plan import PLAN, Plan, Row, choices_file, create_context, leave, plan_of
from accel.planning.ranks import agree_to_optimize
from accel.report import Report
from accel.verification.metrics import Quality
from accel.verification.verify import against_stock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
P = ParamSpec("P")


def optimize(
    obj: T,
    options: Options | None = None,
    *,
    attention: Attention = "auto",
    layout: Layout = "auto",
    graphs: bool | Literal["auto"] = "auto",
    graph_memory_gb: float | None = None,
    step_cache: int | str | None = None,
    weights: str | None = None,
    activations: Activations | None = None,
    keep_original: bool = True,
    kv_cache: KvCache | None = None,
    cpu: Cpu = "auto",
    parallel: Parallel | None = None,
    padding: Padding = "stock",
    memory: int | float | str | None = None,
    host_memory: int | float | str | None = None,
    strict: bool = False,
    **unknown: NoReturn,
) -> T:
    """Makes every later call of obj faster, in place; returns obj.

    obj: a model or a pipeline of diffusers or transformers, or what holds some: an adapter's or torch's wrapper, a
    module or an object of your own, a list, tuple or dictionary. Models are found inside; the rest runs as it is.
    options: an `accel.Options`; or its fields as keywords, which it explains. Both together raise TypeError, but for
    keywords that ask for the default. Calling it again plans anew, with the new options.
    Raises TypeError for another object or an unknown option. Raises ValueError for a wrong value, or an object without
    a model or weights: `errors.Refused` for a value that does not fit this model, and with strict=True
    `errors.SkippedSite` for a site that would be skipped. obj is then as it was. Warns where weights= fits no linear
    layer of a model. Other threads may call obj meanwhile: their calls run stock, or wait while weights move;
    `errors.InUse` where one does not end.
    """
    chosen = choose(options, locals(), unknown)  # all keywords by their names
    parts = _parts(obj)
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    if models and all(map(targets.on_meta, models)):
        raise ValueError(f"the weights of this {type(obj).__name__} are on the meta device, without values: load them")
    for name, takes, kinds in (
        ("weights", takes_weights, "causal language models, encoders, and denoisers, such as UNets"),
        ("activations", takes_weights, "causal language models, encoders, and denoisers, such as UNets"),
        ("kv_cache", keeps_keys, "causal language models and encoder-decoders"),
        ("parallel", divides, "denoisers, such as UNets, and autoencoders that decode tiles"),
    ):
        value = getattr(chosen, name)
        if value is not None and not any(map(takes, parts.values())):
            raise ValueError(f"{name}={value!r}: for {kinds}; a {type(obj).__name__} holds none")
    ranks = None if chosen.parallel is None else world(f"parallel={chosen.parallel!r}")
    for name, part in parts.items():
        agree_to_optimize(name, part, chosen, ranks)
    if any(tensor.is_cuda for model in models for tensor in model.parameters()):
        prepare()  # what compiles kernels starts while the models are examined
    for part in parts.values():
        disown_inside(part)
    before: dict[str, Any] = {name: plan_of(part) for name, part in parts.items()}
    taken: list[str] = []
    applied: list[str] = []
    with others_run_stock() as tried, examining(chosen):
        try:
            for name, plan in reversed(before.items()):
                if plan is not None:
                    plan.undo()
                    taken.append(name)
            context = create_context(chosen, choices_file)
            note_turns(context, parts.values())
            note_denoiser(context, parts.values())
            for name, part in parts.items():
                plan = plan_for(part, context)
                plan.apply()
                applied.append(name)
                vars(part)[PLAN] = plan
            for name in applied:
                whole_models.decide(vars(parts[name])[PLAN])
            if chosen.step_cache is not None:
                drawing = [part for part in parts.values() if targets.is_pipeline(part)]
                _settle_step_cache(drawing[0] if len(drawing) == 1 else obj, chosen.step_cache, context)
            tried(*models)
        except BaseException:
            with alone(*models, anyway=True):
                for name in reversed(applied):
                    vars(parts[name]).pop(PLAN).undo()
                for name in taken:
                    vars(parts[name]).pop(PLAN, None)  # what cannot be again stays stock
                for name in reversed(taken):
                    before[name].apply()
                    vars(parts[name])[PLAN] = before[name]
            raise
    plans = [vars(parts[name])[PLAN] for name in applied]
    for name, plan in zip(applied, plans, strict=True):
        plan.users = targets.WeakList(before[name].users if before[name] is not None else ())
        plan.settle()
    targets.note_optimized(obj, plans)
    for told in (*newer_than_tested(), *(told for plan in plans for told in plan.warnings)):
        warnings.warn(f"accel.optimize: {told}", stacklevel=2)
    return obj


def quantize(
    model: T,
    scheme: str,
    calibration: Iterable[Any] | None = None,
    tokenizer: Any = None,
    method: str | None = None,
    out: str | os.PathLike[str] | None = None,
    activations: str | None = None,
    device: str | torch.device | None = None,
) -> T:
    """Stores the linear layers inside a language model's decoder layers in fewer bits, for good; returns the model.

    model: or what holds one. scheme: a value of `Options.weights`. method: "rtn" rounds to nearest; "gptq", "awq" and
    "smoothquant" look at calibration data, of which the first 128 rows are read: texts (with their tokenizer), a data
    set with a column "text" or "input_ids", or an iterable of batches. None: "gptq" where there is such data, else
    "rtn".
    activations: a value of `Options.activations`, which the model then does by itself, optimized or not, and a saved
    one again when `load` reads it ("int8-outliers" is not saved: no file says such a thing). "int8-static" and
    "fp8-static" need calibration data: the largest input of each linear layer there fixes one scale for all of its
    inputs, what is beyond saturates. None: "int8" for "smoothquant", which is made for them, else none.
    out: a folder where the model is saved, as `model.save_pretrained(out)` does, with the tokenizer if one is given.
    Layers are written as they are done: an interrupted run of the same model, scheme, method and data goes on there.
    device: where layers are worked on, one after the other, while the model stays where it is, such as a model on the
    CPU that is larger than the GPU's memory; None: where it is.

    Experts of a mixture keep their dtype, since no file holds them in fewer bits; `accel.optimize(weights=...)` rounds
    them. It cannot be undone: the original weights wait on the CPU until all is done, and are freed; load the model
    again to have them. `accel.optimize(model)` then runs it fast.
    Raises TypeError for another object or another kind of data. Raises ValueError for a wrong value, a method without
    the data it needs, NaN or Inf in a weight, an `out` that holds something else. The model is then as it was.
    Raises OSError where `out` cannot be written, such as on a full disk: the same call then goes on. Calls on other
    threads wait until it has ended.
    """
    found = [part for part in targets.models_in(model).values() if is_language_model(part)]
    if len(found) != 1:
        holds = f", which holds {len(found)} of them" if found else ""
        raise TypeError(
            f"accel.quantize takes a causal language model of transformers, not a {type(model).__name__}{holds}"
        )
    from accel.llm.ptq.run import quantize as run
    from accel.progress import bar

    with bar(f"quantizing to {scheme}") as at, alone(found[0]):
        folder = None if out is None else Path(out)
        run(found[0], scheme, calibration, tokenizer, method, folder, at, activations, device)
    return model


def load(
    folder: str | os.PathLike[str], dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> "PreTrainedModel":
    """The causal language model saved in this folder; quantized layers are loaded as they are stored, never whole.

    folder: what `model.save_pretrained` or `accel.quantize(..., out=folder)` wrote, or another one in the layout of
    compressed-tensors, which need not be installed; of an unquantized model too, and whatever else transformers loads
    in the format it has, such as float8 by blocks. dtype: of what is not quantized, "auto" for that of the file.
    device: None for the CPU. `accel.optimize(model)` then runs it fast.
    A folder that `accel shard --tp N` wrote is loaded by N processes that torchrun starts: each reads its own files
    alone, has what transformers' own tensor parallelism would give it, and takes the device of its number.
    Raises ValueError for files that are missing, damaged or do not fit the configuration or one another. So it does for
    another number of processes than N, and for a device where each has its own.
    """
    from accel.llm.ptq.formats.loading import load as loaded
    from accel.llm.shards.manifest import is_divided

    if is_divided(Path(folder)):
        from accel.llm.shards.loading import load as loaded_part

        return loaded_part(Path(folder), dtype, device)
    return loaded(Path(folder), dtype, device)


def restore(obj: T) -> T:
    """Undoes `optimize` exactly: attributes, strides, outputs; returns obj. Does nothing to an object never optimized.

    Models that a pipeline held when it was optimized, and has replaced since, are restored too. One stays optimized
    where another optimized pipeline uses it, or where it was optimized again by itself, which a warning says. Weights
    quantized with keep_original=False stay so, which a warning says. Calls under way on other threads end first.
    Changes nothing and raises `errors.PatchConflict` where someone replaced a forward on top of ours, `errors.InUse`
    where such a call does not end.
    """
    before = targets.replaced_models(obj)
    plans, left = list(_plans(obj, bool(before)).values()), []
    for plan in filter(None, map(plan_of, before)):
        reason = targets.why_still_optimized(obj, plan.root, plan.users)
        if reason is None:
            plans.append(plan)
        else:
            left.append(f"a {type(plan.root).__name__} that this {type(obj).__name__} held stays optimized: {reason}")
    for plan in plans:
        for patch in plan.patches:
            patch.check()
    for plan in plans:
        leave(plan.patches)
    with alone(*(model for plan in plans for model in plan.models)):
        for plan in reversed(plans):
            plan.undo()
            vars(plan.root).pop(PLAN)
    for part in targets.parts_in(obj).values():
        disown_inside(part)
        if isinstance(part, nn.Module):
            release_forsaken(part)
    targets.forget_optimized(obj)
    for told in left:
        warnings.warn(f"accel.restore: {told}", stacklevel=2)
    lost = sum(not row["reversible"] for plan in plans for row in plan.weights)
    if lost:
        warnings.warn(
            f"accel.restore: {lost} weights stay quantized, their originals were not kept "
            "(keep_original=False); load the model again to have them",
            stacklevel=2,
        )
    return obj


def report(obj: object) -> Report:
    """What `optimize` did to obj and how calls have gone since. Of an object that is not optimized it says so."""
    return Report.of(_plans(obj))


def _within_a_block(make: Callable[P, T]) -> Callable[P, AbstractContextManager[T]]:
    @wraps(make)
    @contextmanager
    def within(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        obj = make(*args, **kwargs)
        try:
            yield obj
        finally:
            restore(obj)

    return within


optimized = _within_a_block(optimize)
optimized.__name__ = optimized.__qualname__ = "optimized"
optimized.__doc__ = (
    "`with accel.optimized(pipe): ...` optimizes for the block and restores after it; takes what `optimize` takes."
)


def verify(obj: object, *args: Any, seed: int = 0, **kwargs: Any) -> Quality:
    """Runs obj(*args, **kwargs) optimized and stock, from the same seed, and compares the outputs.

    For a pipeline give what you call it with (verify(pipe, "a prompt", num_inference_steps=20)); without arguments a
    text-to-image pipeline draws an example. Its models are compared one by one too, each on the inputs it had in the
    stock run. For a model give its inputs; UNets, VAEs and text encoders make their own if none are given.
    `Quality.passed` and `.verdict` say whether rounding explains the difference: a model passes where it is no more
    than twice as far from itself in full precision as stock is. A causal language model is judged by the logits of a
    prompt and of decode steps, and `Quality.agreement` says what that means for tokens; it takes what generate() takes
    (verify(model, **tokenizer("a text", return_tensors="pt"))), or makes a padded batch of its own. Generators among
    the arguments are left as they were.
    obj is optimized again afterwards, also after an error. Raises ValueError for an object that is not optimized or
    a pipeline of which no example call is known, TypeError for such a model.
    """
    plans = _plans(obj)
    if not plans:
        raise ValueError("nothing to verify: this object is not optimized; call accel.optimize(obj) first")
    models = list(targets.models_in(obj).values())
    if not (args or kwargs) and len(models) == 1 and not targets.is_pipeline(obj):
        obj = models[0]  # of which an example call may be known
    if not callable(obj):
        raise TypeError(f"a {type(obj).__name__} is not called: verify what it holds one by one")
    from accel.llm import verify as language

    if len(models) == 1 and (subject := language.subject(obj, args, kwargs)) is not None:
        return language.agreement_with_stock(*subject, plans, seed)
    if not args and not kwargs:
        kwargs = example_of(obj)
    return against_stock(obj, plans, args, kwargs, seed)


def _settle_step_cache(obj: object, wanted: int | str, context: Context) -> None:
    """Finds the interval; a model whose images keep the quality with none is planned anew, without a step cache."""
    from accel.diffusion.step_cache.budget import settle
    from accel.diffusion.step_cache.cache import NAME

    for plan, reason in settle(obj, _plans(obj).values(), wanted):
        plan.undo()
        try:
            whole = plan_for(plan.root, replace(context, options=replace(context.options, step_cache=None)))
            whole.apply()
        except BaseException:
            plan.apply()
            raise
        whole.rows.append(Row("", NAME, "skipped", reason))
        vars(plan.root)[PLAN] = whole
        whole_models.decide(whole)


def _parts(obj: object) -> dict[str, object]:
    """What of obj may be patched, by its path. Raises TypeError or ValueError for an object without a model."""
    parts = targets.parts_in(obj)
    if not any(isinstance(part, nn.Module) for part in parts.values()):
        raise targets.nothing_in(obj)
    return parts


def _plans(obj: object, empty: bool = False) -> dict[str, Plan]:
    """Those of its parts. empty: it may hold nothing any more."""
    plans = {name: plan_of(part) for name, part in (targets.parts_in(obj) if empty else _parts(obj)).items()}
    return {name: plan for name, plan in plans.items() if plan is not None}
