"""One case, start to end: correctness first, then stock, accel and torch.compile side by side in one process."""

import copy
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import accel
from accel.bench import accuracy
from accel.bench import quantized as quantized
from accel.bench.cases import Case, shapes
from accel.bench.machine import provenance
from accel.bench.memory import peak_mb, release
from accel.bench.ready import time_to_ready
from accel.bench.timing import compare_times, seconds
from accel.errors import told
from accel.quantization.module import unrounded
from accel.tolerances import TIMES_STOCK
from accel.verification.metrics import Quality

STAGES = (
    "time to ready",
    "building",
    "stock and its reference",
    "accel: correctness and memory",
    "torch.compile",
    "timing",
)


class WrongResult(RuntimeError):
    """The optimized module is not as exact as it must be; no figure is reported."""


@contextmanager
def fresh_inductor_cache() -> Iterator[None]:
    """torch.compile inside compiles anew, so that the seconds it takes are those of a first run."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="accel-inductor-", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _compiled(case: Case, module: nn.Module, inputs: list[dict]) -> Callable[[int], torch.Tensor]:
    function = torch.compile(getattr(module, case.entry), mode="reduce-overhead")

    def step(i: int) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return function(**inputs[i % len(inputs)], return_dict=False)[0]

    return step


def _step(case: Case, module: nn.Module, inputs: list[dict]) -> Callable[[int], torch.Tensor]:
    return lambda i: case.call(module, inputs[i % len(inputs)])


def _judged(products: dict[str, Quality]) -> dict[str, float | None]:
    """Errors of rounded rows and of their products, by what is allowed. Raises WrongResult for one above 1."""
    for name, quality in products.items():
        if not quality.passed:
            raise WrongResult(f"{name}: {quality.failure}")
    return {name: quality.error for name, quality in products.items()}


def _check(outputs: list, stock: list, exact: list) -> dict:
    """Errors against full precision; raises WrongResult where accel's is more than LIMIT times stock's."""
    stock_error, error = (accuracy.relative_error(found, exact) for found in (stock, outputs))
    if not error <= TIMES_STOCK * stock_error:  # nan fails too
        raise WrongResult(
            f"error against full precision {error:.3g}, stock's {stock_error:.3g}: "
            f"more than {TIMES_STOCK:g} times as much, so nothing was timed"
        )
    return {
        "measure": f"relative RMS against {exact[0].dtype}, worst of {len(exact)} calls".replace("torch.", ""),
        "stock_vs_fp32": stock_error,
        "accel_vs_fp32": error,
        "accel_vs_stock_max_abs": accuracy.max_abs_error(outputs, stock),
    }


def _sites(report: accel.Report) -> dict[str, int]:
    return dict(Counter(status for _, _, status, _ in report.sites))


def _equal(outputs: list, others: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


def run(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    *,
    compiled: bool = True,
    ready: bool = True,
    weights: str | None = None,
    activations: str | None = None,
    budget_s: float = 2.0,
    stage: Callable[[str], None] = lambda name: None,
) -> dict:
    """Runs a case and gives its result as one dict, ready for JSON. Raises WrongResult before any figure.

    weights, activations: of `Options`, for what is called accel; how exact it is, is then asked over the same rounded
    weights and without rounding rows, whose products are judged apart; how far from stock it is told as `lost`.
    """
    result: dict[str, Any] = {
        "case": "-".join(filter(None, (case.name, weights, activations and f"activations-{activations}"))),
        "about": case.about,
        **provenance(device, dtype),
    }
    stage(STAGES[0])
    result["ready"] = time_to_ready(case, device, dtype) if ready and weights is None else {}
    try:
        found = _side_by_side(case, device, dtype, compiled, weights, activations, budget_s, stage)
    finally:
        if compiled:
            torch.compiler.reset()  # its graphs hold memory, and the next case of this class would count as a recompile
        release(device)
    result["ready"] |= found.pop("ready")
    return result | found


@torch.no_grad()
def _side_by_side(
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    compiled: bool,
    weights: str | None,
    activations: str | None,
    budget_s: float,
    stage: Callable[[str], None],
) -> dict:
    stage(STAGES[1])
    module = case.build(device, dtype)
    inputs = case.inputs(device, dtype)
    result: dict[str, Any] = {"shapes": shapes(inputs[0])}

    def outputs() -> list[torch.Tensor]:
        return [case.call(module, kwargs) for kwargs in inputs]

    stage(STAGES[2])
    stock = outputs()
    repeatable = _equal(outputs(), stock)
    exact = accuracy.reference(case, module, inputs, dtype)
    stock_memory = peak_mb(device, outputs, outputs)

    stage(STAGES[3])
    given = {"weights": weights, "activations": activations}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    in_process_s = seconds(lambda: (accel.optimize(module, **options), case.call(module, inputs[0])), device)
    ours = outputs()
    if weights is not None:
        result["lost"] = quantized.weight_loss(module, ours, stock)
        result |= options
        if activations is not None:
            result["products"] = _judged(quantized.products(case, module, inputs[-1]))
        with unrounded(module):
            ours = outputs()
        result["error"] = _check(ours, *quantized.over_the_same_weights(case, module, inputs, dtype))
    else:
        result["error"] = _check(ours, stock, exact)
    result["sites"] = _sites(accel.report(module))
    accel.restore(module)
    result["restored_bit_equal"] = _equal(outputs(), stock) if repeatable else None
    if result["restored_bit_equal"] is False:
        raise WrongResult("after accel.restore the module's output is not stock's any more")
    if weights is None:
        accel_memory = peak_mb(device, lambda: (accel.optimize(module), outputs()), outputs)
    else:
        accel.optimize(module, **options)  # beforehand: while it rounds, the originals are there too
        accel_memory = peak_mb(device, outputs, outputs)
    result["peak_memory_mb"] = {"stock": stock_memory, "accel": accel_memory}
    accel.restore(module)

    stage(STAGES[4])
    steps = {"stock": _step(case, copy.deepcopy(module), inputs)}
    result["ready"] = {"in_process_s": round(in_process_s, 3)}
    if compiled:
        step = _compiled(case, copy.deepcopy(module), inputs)
        try:
            with fresh_inductor_cache():
                compile_s = seconds(lambda: step(0), device)
                own = [step(i).clone() for i in range(len(inputs))]
        except Exception as error:  # whatever a compiler may raise is its own result, and accel's stands without it
            result["compile_failed"] = told(error)
        else:
            result["ready"]["compile_s"] = round(compile_s, 1)
            result["error"]["compile_vs_fp32"] = accuracy.relative_error(own, exact)
            steps["compile"] = step

    stage(STAGES[5])
    accel.optimize(module, **options)
    steps["accel"] = _step(case, module, inputs)
    for name, timing in compare_times(steps, device, budget_s=budget_s).items():
        result[name] = timing.to_dict()
    report = accel.report(module).to_dict()
    result |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
    return result
