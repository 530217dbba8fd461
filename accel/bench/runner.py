"""One case, start to end: correctness first, then stock, accel and torch.compile side by side in one process."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import accel
from accel.bench import accuracy
from accel.bench import quantized as quantized
from accel.bench.case import Case, shapes
from accel.bench.compiled import compiled_step, fresh_inductor_cache
from accel.bench.machine import provenance
from accel.bench.memory import peak_mb, release
from accel.bench.ready.states import lost_s, measure_states
from accel.bench.timing import Clock, compare_times, seconds
from accel.comparison import worst_rms
from accel.errors import logged
from accel.quantization.module import unrounded
from accel.tolerances import FLOOR, TIMES_STOCK, UNITS
from accel.verification.metrics import Quality

STAGES = (
    "building",
    "stock and its reference",
    "accel: correctness and memory",
    "torch.compile",
    "timing",
    "time to ready",
)
TO_A_GRAPH = 3  # calls: eager, captured, replayed
LEAST_READY = 60.0  # seconds that a process which has been begun gets at least


class WrongResult(RuntimeError):
    """The optimized module is not as exact as it must be; no figure is reported."""


def stock_twin(module: nn.Module) -> nn.Module:
    """A second module over the same memory of weights and buffers, with parameters of its own."""
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, shared | {id(buffer): buffer.detach() for buffer in module.buffers()})


def _step(case: Case, module: nn.Module, inputs: list[dict]) -> Callable[[int], torch.Tensor]:
    return lambda i: case.call(module, inputs[i % len(inputs)])


def _judged(products: dict[str, Quality]) -> dict[str, float | None]:
    """Errors of rounded rows and of their products, by what is allowed. Raises WrongResult for one above 1."""
    for name, quality in products.items():
        if not quality.passed:
            raise WrongResult(f"{name}: {quality.failure}")
    return {name: quality.error for name, quality in products.items()}


def _check(outputs: list, stock: list, exact: list) -> dict:
    """Errors against full precision of the last calls, those that `exact` is of.

    Raises WrongResult where accel's is more than TIMES_STOCK times stock's, in float32 more than FLOOR too; where there
    is nothing in full precision, where accel is more than UNITS from stock. Every number must be finite.
    """
    error = worst_rms(outputs, stock)
    if not math.isfinite(error):
        raise WrongResult("an output is not finite, so nothing was timed")
    told_apart = {"accel_vs_stock": error, "accel_vs_stock_max_abs": accuracy.max_abs_error(outputs, stock)}
    if not exact:
        allowed = UNITS * torch.finfo(outputs[0].dtype).eps / 2
        if error > allowed:
            raise WrongResult(f"{error:.3g} from stock, more than {allowed:.3g}, so nothing was timed")
        return {"measure": f"relative RMS against stock, worst of {len(stock)} calls"} | told_apart
    stock_error, error = (worst_rms(found[-len(exact) :], exact) for found in (stock, outputs))
    floor = FLOOR if outputs[0].dtype == torch.float32 else 0.0
    if not error <= max(TIMES_STOCK * stock_error, floor):
        raise WrongResult(
            f"error against full precision {error:.3g}, stock's {stock_error:.3g}: "
            f"more than {TIMES_STOCK:g} times as much, so nothing was timed"
        )
    return {
        "measure": f"relative RMS against {exact[0].dtype}, worst of {len(exact)} calls".replace("torch.", ""),
        "stock_vs_fp32": stock_error,
        "accel_vs_fp32": error,
        **told_apart,
    }


def _sites(report: accel.Report) -> dict[str, int]:
    return dict(Counter(status for _, _, status, _ in report.sites))


def _equal(outputs: list, others: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


@dataclass
class _Run:
    """A case as it runs. keep: is given the result whenever there is more of it, correctness first."""

    case: Case
    device: torch.device
    dtype: torch.dtype
    options: dict[str, Any]
    clock: Clock
    stage: Callable[[str], None]
    keep: Callable[[dict], object]
    result: dict[str, Any]
    exact: list[torch.Tensor] = field(default_factory=list)
    stock: list[torch.Tensor] = field(default_factory=list)
    inputs: list[dict] = field(default_factory=list)

    def begin(self) -> nn.Module:
        self.stage(STAGES[0])
        module = self.case.build(self.device, self.dtype)
        self.inputs = self.case.inputs(self.device, self.dtype)
        weights = [*module.parameters(), *module.buffers()]
        self.result |= {
            "shapes": shapes(self.inputs[0]),
            "weights_gb": round(sum(weight.nbytes for weight in weights) / 1e9, 6),
        }
        return module

    def calls(self, module: nn.Module, number: int | None = None) -> list[torch.Tensor]:
        """Outputs of so many calls, the inputs in turn; without a number one of each."""
        step = _step(self.case, module, self.inputs)
        return [step(i) for i in range(len(self.inputs) if number is None else number)]

    def peak(self, first: Callable[[], object], module: nn.Module) -> dict | None:
        return peak_mb(self.device, first, lambda: self.calls(module, 1))

    def fail(self, what: str, error: Exception) -> None:
        self.result.setdefault("failed", {})[what] = logged(error)

    def in_time(self, what: str) -> bool:
        """Whether something may still be begun; what may not is noted."""
        if self.clock.left() > 0:
            return True
        self.result.setdefault("skipped", []).append(what)
        return False

    def of_stock(self, module: nn.Module) -> bool:
        """Stock's outputs, reference and memory; whether it gives the same twice."""
        self.stage(STAGES[1])
        again: list[torch.Tensor] = []

        def every() -> None:
            self.stock = self.calls(module)

        def first() -> None:
            again[:] = self.calls(module, 1)

        memory = peak_mb(self.device, every, first)
        if memory is None:  # nothing was called
            every()
            first()
        self.result["peak_memory_mb"] = {"stock": memory}
        self.exact = self._reference(module)
        return _equal(again, self.stock[:1])

    def _reference(self, module: nn.Module) -> list[torch.Tensor]:
        if not self.case.exact:
            return []
        try:
            return accuracy.reference(self.case, module, self.inputs[-self.case.exact :], self.dtype)
        except torch.OutOfMemoryError as error:  # the bound from stock is left
            self.result["reference_failed"] = logged(error)
            return []
        finally:
            release(self.device)

    def of_accel(self, module: nn.Module, repeatable: bool) -> None:
        """Whether accel is right, what it takes until it is ready, and its memory; the module is as it was then."""
        self.stage(STAGES[2])
        in_process_s = seconds(lambda: (accel.optimize(module, **self.options), self.calls(module, 1)), self.device)
        self.result["ready"]["in_process_s"] = round(in_process_s, 3)
        ours = self.calls(module)
        if self.options:
            self._of_quantized(module, ours)
        else:
            self.result["error"] = _check(ours, self.stock, self.exact)
        self.result["sites"] = _sites(accel.report(module))
        accel.restore(module)
        equal = _equal(self.calls(module, 1), self.stock[:1]) if repeatable else None
        self.result["restored_bit_equal"] = equal
        if equal is False:
            raise WrongResult("after accel.restore the module's output is not stock's any more")
        if self.options:
            accel.optimize(module, **self.options)  # beforehand: while it rounds, the originals are there too
            memory = self.peak(lambda: self.calls(module, TO_A_GRAPH), module)
        else:
            memory = self.peak(lambda: (accel.optimize(module), self.calls(module, TO_A_GRAPH)), module)
        self.result["peak_memory_mb"]["accel"] = memory
        accel.restore(module)

    def _of_quantized(self, module: nn.Module, ours: list[torch.Tensor]) -> None:
        self.result["lost"] = quantized.weight_loss(module, ours, self.stock)
        self.result |= self.options
        if "activations" in self.options:
            self.result["products"] = _judged(quantized.products(self.case, module, self.inputs[-1]))
        with unrounded(module):
            ours = self.calls(module)
        number = min(self.case.exact, len(self.exact))  # where full precision did not fit, it does not now
        stock, exact = quantized.over_the_same_weights(self.case, module, self.inputs, self.dtype, number)
        self.result["error"] = _check(ours, stock, exact)

    def of_compile(self, module: nn.Module) -> Callable[[int], torch.Tensor]:
        """A compiled step; how long until it is ready, with caches empty and full, its error and its memory."""
        step = compiled_step(self.case, module, self.inputs)
        own: list[torch.Tensor] = []

        def outputs() -> None:
            own[:] = [step(i).clone() for i in range(len(self.inputs))]

        with fresh_inductor_cache():
            cold_s = seconds(lambda: step(0), self.device)
            memory = peak_mb(self.device, outputs, lambda: step(0))
            if memory is None:
                outputs()
            self.result["ready"]["compile_s"] = round(cold_s, 1)
            if self.case.compiled == "blocks" and self.in_time("torch.compile with its cache"):
                torch.compiler.reset()
                self.result["ready"]["compile_warm_s"] = round(seconds(lambda: step(0), self.device), 1)
        self.result["compiled"] = self.case.compiled
        self.result["peak_memory_mb"]["compile"] = memory
        errors = self.result.setdefault("error", {})
        if self.exact:
            errors["compile_vs_fp32"] = worst_rms(own[-len(self.exact) :], self.exact)
        errors["compile_vs_stock"] = worst_rms(own, self.stock)
        return step


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
    limit_s: float = math.inf,
    stage: Callable[[str], None] = lambda name: None,
    keep: Callable[[dict], object] = lambda result: None,
) -> dict:
    """Runs a case and gives its result as one dict, ready for JSON. Raises WrongResult before any figure.

    What fails, accel or torch.compile, is told under `failed`, and the others are timed all the same.
    weights, activations: of `Options`, for what is called accel; how exact it is, is then asked over the same rounded
    weights and without rounding rows, whose products are judged apart; how far from stock it is told as `lost`.
    limit_s: after so many seconds neither torch.compile nor the time to ready is begun, which `skipped` tells.
    keep: is given the result as it grows.
    """
    given = {"weights": weights, "activations": activations}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    result: dict[str, Any] = {
        "case": "-".join(filter(None, (case.name, weights, activations and f"activations-{activations}"))),
        "about": case.about,
        **provenance(device, dtype),
        "ready": {},
    }
    going = _Run(case, device, dtype, options, Clock(limit_s), stage, keep, result)
    try:
        _side_by_side(going, compiled and case.compiled is not None, budget_s)
    finally:
        if compiled:
            torch.compiler.reset()  # its graphs hold memory, and the next case of this class would count as a recompile
        release(device)
    going.exact, going.stock, going.inputs = [], [], []
    release(device)
    if ready and weights is None and going.in_time("time to ready"):
        stage(STAGES[5])
        try:
            result["ready"] |= _ready(going)
        except RuntimeError as error:
            going.fail("time to ready", error)
    return result


def _ready(going: _Run) -> dict[str, float]:
    """Seconds in fresh processes. Raises RuntimeError where one fails or takes more than is left."""

    def left() -> float | None:
        seconds_left = going.clock.left()
        return None if math.isinf(seconds_left) else max(seconds_left, LEAST_READY)

    rows = measure_states(going.case.name, going.device, going.dtype, more=("--images",), left=left)
    cold, warm = rows["cold"], rows["warm"]
    return {
        "cold_s": cold["ready_s"],
        "warm_s": warm["ready_s"],
        "cold_lost_s": lost_s(cold),
        "warm_lost_s": lost_s(warm),
        "stock_first_call_s": rows["stock"]["ready_s"],
    }


@torch.no_grad()
def _side_by_side(going: _Run, compiled: bool, budget_s: float) -> None:
    case, device, result = going.case, going.device, going.result
    module = going.begin()
    repeatable = going.of_stock(module)
    try:
        going.of_accel(module, repeatable)
    except WrongResult:
        raise
    except Exception as error:  # what stock and the compiler take is worth knowing all the same
        going.fail("accel", error)
    if "accel" in result.get("failed", {}):
        del module  # in whatever state it is
        release(device)
        module = going.begin()
    going.keep(result)

    going.stage(STAGES[3])
    steps = {"stock": _step(case, stock_twin(module), going.inputs)}
    if compiled and going.in_time("torch.compile"):
        try:
            steps["compile"] = going.of_compile(stock_twin(module))
        except Exception as error:  # whatever a compiler may raise is its own result
            result["compile_failed"] = logged(error)
            release(device)

    going.stage(STAGES[4])
    if "accel" not in result.get("failed", {}):
        accel.optimize(module, **going.options)
        steps["accel"] = _step(case, module, going.inputs)
    for name, timing in compare_times(steps, device, budget_s=budget_s, fail=going.fail).items():
        result[name] = timing.to_dict()
    if "accel" in result:
        report = accel.report(module).to_dict()
        result |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
    going.keep(result)
