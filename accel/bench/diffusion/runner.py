"""One subject, start to end: correctness first, then stock, accel and torch.compile side by side in one process."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import accel
from accel.bench.compiled import compiled_step, fresh_inductor_cache
from accel.bench.diffusion.case import Case
from accel.bench.diffusion.subject import Subject
from accel.bench.machine import provenance
from accel.bench.memory import peak_mb, release
from accel.bench.results import BenchRecord, WrongResult
from accel.bench.timing import compare_times, seconds
from accel.bench.weights import SEED
from accel.comparison import worst_rms
from accel.planning.targets import models_in
from accel.verification.metrics import Quality, tensors

STAGES = ("building", "stock", "accel: correctness and memory", "torch.compile", "timing")
TO_A_GRAPH = 3  # calls: eager, captured, replayed


def stock_twin(obj: Any) -> Any:
    """A copy over the same memory of weights and buffers, with parameters of its own."""
    shared: dict[int, Any] = {}
    for model in models_in(obj).values():
        shared |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
        shared |= {id(buffer): buffer.detach() for buffer in model.buffers()}
    return copy.deepcopy(obj, shared)


def run(
    name: str,
    make: Callable[[], Subject],
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: Case | None = None,
    options: dict[str, Any] | None = None,
    budget_s: float = 2.0,
    limit_s: float = math.inf,
    stage: Callable[[str], None] = lambda name: None,
    keep: Callable[[dict], object] = lambda result: None,
) -> dict:
    """Runs what `make` gives; the result as one dict, ready for JSON. Raises WrongResult before any figure.

    What fails, accel or torch.compile, is told under `failed`, and the others are timed all the same.
    compiled: the case, where torch.compile is timed beside. options: of `accel.optimize`.
    limit_s: after so many seconds torch.compile is not begun, which `skipped` tells.
    keep: is given the result as it grows.
    """
    options = options or {}
    named = {"weights": "", "activations": "activations-"}
    about = {"case": "-".join([name, *(prefix + options[key] for key, prefix in named.items() if key in options)])}
    record = BenchRecord(about | options, {"ready": {}}, limit_s, keep)
    record.about |= provenance(device, dtype)
    try:
        _side_by_side(record, make, device, compiled, options, budget_s, stage)
    finally:
        if compiled is not None:
            torch.compiler.reset()  # its graphs hold memory, and the next case of this class would count as a recompile
        release(device)
    return record.result


@torch.no_grad()
def _side_by_side(
    record: BenchRecord,
    make: Callable[[], Subject],
    device: torch.device,
    compiled: Case | None,
    options: dict[str, Any],
    budget_s: float,
    stage: Callable[[str], None],
) -> None:
    stage(STAGES[0])
    subject = make()
    record.about["about"] = subject.about
    models = models_in(subject.obj).values()
    size = sum(weight.nbytes for model in models for weight in (*model.parameters(), *model.buffers()))
    record.body["weights_gb"] = round(size / 1e9, 6)
    stage(STAGES[1])
    record.body["ready"]["stock_first_call_s"] = round(seconds(subject, device), 3)
    record.body["peak_memory_mb"] = {"stock": peak_mb(device, lambda: _each(subject), subject)}
    stock = subject.outputs()
    record.body["shapes"] = subject.shapes or {"image": list(stock[0].shape)}
    stage(STAGES[2])
    works = True
    try:
        _judge(record, subject, stock, device, options)
    except WrongResult:
        raise
    except Exception as error:  # what stock and the compiler take is worth knowing all the same
        record.fail(error, variant="accel")
        works = False
        del subject  # in whatever state it is
        release(device)
        subject = make()
    record.save()

    steps: dict[str, Callable[[int], Any]] = {"stock": partial(subject.call, stock_twin(subject.obj))}
    if compiled is not None and record.in_time(case="torch.compile"):
        stage(STAGES[3])
        try:
            steps["compile"] = _compiled(record, compiled, subject, stock, device)
        except Exception as error:  # whatever a compiler may raise is its own result
            record.fail(error, variant="compile")
            release(device)

    stage(STAGES[4])
    if works:
        accel.optimize(subject.obj, **options)
        steps["accel"] = subject
    times = compare_times(steps, device, budget_s=budget_s, fail=lambda name, error: record.fail(error, variant=name))
    record.body |= {name: timing.to_dict() for name, timing in times.items()}
    if "accel" in times:
        report = accel.report(subject.obj).to_dict()
        record.body |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
    record.save()


def _each(subject: Subject, calls: int | None = None) -> None:
    for i in range(len(subject.inputs) if calls is None else calls):
        subject(i)


def _judge(
    record: BenchRecord, subject: Subject, stock: list[torch.Tensor], device: torch.device, options: dict[str, Any]
) -> None:
    """Whether accel is right, what it takes until it is ready, and its memory; the object is as it was then."""
    obj, again = subject.obj, subject.outputs(1)
    repeatable = _equal(again, stock)
    in_process_s = seconds(lambda: (accel.optimize(obj, **options), subject()), device)
    record.body["ready"]["in_process_s"] = round(in_process_s, 3)
    ours = subject.outputs()
    quality = accel.verify(subject.verified, seed=SEED, **subject.inputs[-1])
    if not quality.passed:
        raise WrongResult(f"{quality.verdict}; nothing was timed")
    report = accel.report(obj)
    record.body |= {
        "error": _errors(quality) | {"accel_vs_stock": worst_rms(ours, stock)},
        "quality": quality.to_dict(),
        "sites": dict(Counter(status for _, _, status, _ in report.sites)),
    }
    accel.restore(obj)
    record.body["restored_bit_equal"] = _equal(subject.outputs(1), stock) if repeatable else None
    if record.body["restored_bit_equal"] is False:
        raise WrongResult("after accel.restore the output is not stock's any more")
    if options:
        accel.optimize(obj, **options)  # beforehand: while it rounds, the originals are there too
    first = [] if options else [lambda: accel.optimize(obj)]
    calls = [*first, lambda: _each(subject, TO_A_GRAPH)]
    record.body["peak_memory_mb"]["accel"] = peak_mb(device, lambda: [call() for call in calls], subject)
    accel.restore(obj)


def _errors(quality: Quality) -> dict:
    """The error of the worst model, accel's and stock's, where it could be measured against full precision."""
    judged = [part for part in (quality, *quality.parts.values()) if part.measure.endswith("full precision")]
    worst = max(judged, key=lambda part: part.error or 0.0, default=None)
    told = {"measure": "relative RMS from full precision, of the worst model", "max_abs": quality.max_error}
    return told if worst is None else told | {"accel_vs_fp32": worst.error, "stock_vs_fp32": worst.stock_error}


def _equal(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Of the calls that there are of both."""
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=False))


def _compiled(
    record: BenchRecord, case: Case, subject: Subject, stock: list[torch.Tensor], device: torch.device
) -> Callable[[int], torch.Tensor]:
    """A compiled step; how long until it is ready, with caches empty and full, how far from stock, and its memory."""
    inputs, ready = subject.inputs, record.body["ready"]
    step = compiled_step(case, stock_twin(subject.obj), inputs)
    with fresh_inductor_cache():
        ready["compile_s"] = round(seconds(lambda: step(0), device), 1)
        memory = peak_mb(device, lambda: [step(i) for i in range(len(inputs))], lambda: step(0))
        own = [tensor for i in range(len(inputs)) for tensor in tensors(step(i))]
        if case.compiled == "blocks" and record.in_time(case="torch.compile with its cache"):
            torch.compiler.reset()
            ready["compile_warm_s"] = round(seconds(lambda: step(0), device), 1)
    record.body["compiled"] = case.compiled
    record.body["peak_memory_mb"]["compile"] = memory
    record.body.setdefault("error", {})["compile_vs_stock"] = worst_rms(own, stock)
    return step
