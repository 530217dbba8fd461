"""The same call stock and optimized, compared as a whole and model by model.

A difference in a model's output grows over the steps of a denoising loop, so a whole image says little about a single
rounding error. Each model is therefore also given the very inputs it had in the stock run, and judged by itself.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from accel.planning.plan import Plan
from accel.quantization.activation_quantization import rounding_linears
from accel.quantization.module import unrounded
from accel.tolerances import DRIFT, SEEN
from accel.verification.call import SeededCall, as_tensors
from accel.verification.metrics import Quality, compare
from accel.verification.model_record import ModelRecord, ModelRecorder
from accel.verification.noise import with_noise
from accel.verification.rounded_products import judge

SAME_WEIGHTS = "over the same weights"  # the part that is judged of a single model whose weights are quantized


def against_stock(obj: Any, plans: Mapping[str, Plan], args: tuple, kwargs: dict, seed: int) -> Quality:
    """Quality of obj(*args, **kwargs), judged; obj is optimized by `plans`, before and after.

    Where weights are quantized the whole is compared with the original weights and told as lossy; what is judged, of
    the model that holds them, is against stock code over the same quantized weights. So are rows that are rounded to 8
    bits: the model is judged without, and the products of such rows one by one.
    """
    call = SeededCall(obj, args, as_tensors(obj, args, kwargs), seed)
    lossy = ", ".join(filter(None, dict.fromkeys(plan.options.lossy for plan in plans.values()))) or None
    ours = call()
    recorder = ModelRecorder({name: plan.root for name, plan in plans.items() if isinstance(plan.root, nn.Module)})
    with stock_models(plans.values()):
        with recorder:
            stock = call()
        records = recorder.records()
        # A record is of a plan's own model, or of a child of it.
        own = {name: plans[next(n for n in (name, name.rpartition(".")[0], "") if n in plans)] for name in records}
        held = {name: plan for name, plan in own.items() if plan.weights}
        for name in records.keys() - held.keys():
            records[name].measure()
        whole = replace(compare(stock, ours), lossy=lossy, note=recorder.note())
        if "" not in records and lossy is None:
            whole = _judged_by_drift(whole, stock, call, records)
    for name, plan in held.items():
        with plan.unfused():
            records[name].repeat(seed)
            records[name].measure()
    # Over the same weights, rows as they are, nothing is lossy but the step cache.
    cached = any(plan.options.step_cache is not None for plan in plans.values())
    rounds = {name: record for name, record in records.items() if rounding_linears(record.module)}
    told = lossy if cached or not (held or rounds) else None
    parts = {}
    for name, record in records.items():
        with unrounded(record.module):
            parts[name] = replace(record.judge(seed), lossy=told)
    # One call, which no graph replays: the products' judge is new to the model.
    products = {
        name: judge(record.module, functools.partial(record.repeated, record.inputs[-1], seed))
        for name, record in rounds.items()
    }
    notes = [whole.note, _told(held) if held else "", _rounded(products) if rounds else ""]
    whole = replace(whole, note="; ".join(filter(None, notes)))
    if "" in parts:  # a single model, and obj itself is what was recorded
        alone = parts.pop("")
        if not held and not rounds:
            return replace(alone, finite=alone.finite and whole.finite)
        parts[SAME_WEIGHTS] = alone
    for name, judged in products.items():
        parts |= {f"{name}: {part}" if name else part: quality for part, quality in judged.items()}
    return replace(whole, parts=parts)


def _told(held: Mapping[str, Plan]) -> str:
    names = ", ".join(filter(None, held))
    note = f"{names or 'the model'} by itself is judged against stock code over the same quantized weights"
    if all(row["reversible"] for plan in held.values() for row in plan.weights):
        return note
    return f"{note}; so is the whole, where the original weights were not kept"


def _rounded(products: Mapping[str, Mapping[str, Quality]]) -> str:
    few = [name or "the model" for name, judged in products.items() if not judged]
    told = f"{', '.join(filter(None, products)) or 'the model'} by itself is judged without rounding rows"
    return f"{told}, of which {', '.join(few)} had too few in this call" if few else told


def _judged_by_drift(whole: Quality, stock: Any, call: SeededCall, records: dict[str, ModelRecord]) -> Quality:
    """A whole output may be as far from stock as rounding can move stock itself.

    Measured where the difference can be seen at all: stock runs once more, each model's output moved by noise as large
    as the model's own rounding error. It is the same noise in every step, as rounding errors of a loop are alike too.
    """
    if not (whole.finite and whole.stock_finite):
        return whole
    judged = replace(whole, error=whole.relative_rms, allowed=SEEN, measure="relative RMS from stock")
    if whole.relative_rms <= SEEN:
        return judged
    own = (
        (record.module, record.own_error if 0 < record.own_error < 1 else record.unit) for record in records.values()
    )
    with with_noise(own):
        drift = compare(stock, call())
    return replace(judged, allowed=max(SEEN, DRIFT * drift.relative_rms))


@contextlib.contextmanager
def stock_models(plans: Iterable[Plan]) -> Iterator[None]:
    """The stock models inside, optimized again afterwards, also after an error. A budget that brings weights to the GPU
    holds for them too: elsewhere they would not compute on what they are given, or draw from other noise.
    """
    undone = []
    try:
        with contextlib.ExitStack() as placed:
            for plan in plans:
                plan.undo()
                undone.append(plan)
                placed.enter_context(plan.placed())
            yield
    finally:
        for plan in undone:
            plan.apply()
