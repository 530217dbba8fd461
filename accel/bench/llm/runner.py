"""One language model, start to end: correctness first, then the parts asked for, as long as there is time."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

import accel
from accel.bench.compiled import fresh_inductor_cache
from accel.bench.llm import cases, single_calls
from accel.bench.llm.cases import TimedCase, Work, interleaved
from accel.bench.llm.models import assistant, beside, build
from accel.bench.llm.request import PARTS, LlmRequest, ModelRequest
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.llm.variants import Variant, lossy_options, lossy_variant
from accel.bench.machine import provenance
from accel.bench.memory import release
from accel.bench.ready.states import measure_states, steady_s
from accel.bench.results import BenchRecord, WrongResult
from accel.bench.timing import seconds
from accel.llm.recording.inputs import example_inputs

IN_TURNS = {"decode": cases.decode, "prefill": cases.prefill, "modes": cases.modes, "long": cases.long}
STAGES = ("building", "correctness", *PARTS)
SHARE = 40  # of the whole time, for the rounds of one case


class ModelRun(BenchRecord):
    """A result as it grows, of stock, accel, and accel with what loses, over one model's weights."""

    def __init__(
        self,
        request: ModelRequest,
        seconds: float,
        device: torch.device,
        dtype: torch.dtype,
        stage: Callable[[str], None] = lambda name: None,
        keep: Callable[[dict], object] = lambda result: None,
    ) -> None:
        """Builds the model. Raises KeyError, ValueError or TypeError for one that cannot be made."""
        super().__init__({}, {}, seconds, keep)
        self.device, self.dtype, self.stage = device, dtype, stage
        stage("building")
        self.model = build(request.model, device, dtype)
        self.stock = beside(self.model)
        self.about = provenance(device, dtype)
        self.variants = [
            Variant("stock", self.stock, assistant=lambda: assistant(self.stock)),
            Variant("accel", self.model, assistant=lambda: accel.optimize(assistant(self.stock))),
        ]

    def add_lossy(self, chosen: Iterable[tuple[str, dict[str, str]]]) -> None:
        """Further variants; one that cannot be made must not cost the others' figures."""
        for name, options in chosen:
            self.stage(f"quantizing to {name}")
            try:
                one, told = lossy_variant(self.stock, name, options, self.device)
                self.variants.append(one)
                self.about.setdefault("quantized", {})[name] = told
            except Exception as error:
                self.fail(error, part="quantizing", case="", variant=name)
                self.release()

    def report(self) -> None:
        """What the optimized model tells of itself."""
        report = accel.report(self.model).to_dict()
        self.about |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
        self.about |= {"sites": dict(Counter(site["status"] for site in report["sites"]))}

    def release(self) -> None:
        """Memory of the case before; an error that it left behind must not cost the figures of others."""
        with contextlib.suppress(RuntimeError):
            release(self.device)


class GenerateRun(ModelRun):
    """The same of `accel bench llm`, part by part."""

    def __init__(self, request: LlmRequest, *args: Any) -> None:
        self.request, self.interrupted = request, False
        super().__init__(request, request.seconds, *args)
        self.chosen = list(lossy_options(request.weights, request.kv_cache, request.activations))
        kind = "quantized" if self.chosen else "llm"
        named = {"case": f"{kind}-{request.name}", "about": f"generate() of {request.name}, {request.filled}"}
        self.about = named | self.about

    @property
    def result(self) -> dict:
        parts = {part: self.body[part] for part in PARTS if part in self.body}
        return self.about | {"parts": parts} | self.trouble

    def out_of_time(self, part: str, case: str = "") -> bool:
        """Whether nothing new may be begun, which is noted: parts keep their share of the time for those after them."""
        after = list(PARTS)[list(PARTS).index(part) + 1 :]
        later = sum(PARTS[name] for name in after if name in self.request.parts)
        if self.clock.left() > later * self.clock.total and not self.interrupted:
            return False
        reason = "interrupted" if self.interrupted else f"its share of {self.clock.total:g} seconds was over"
        self.skipped.append({"part": part, "case": case, "reason": reason})
        return True

    def begins(self, part: str) -> bool:
        """Whether the part is asked for and there is time; it is the stage then."""
        if part not in self.request.parts or self.out_of_time(part):
            return False
        self.stage(part)
        return True

    def in_turns(self, case: TimedCase) -> None:
        """Times a case in turns; with the compiler, where it is asked for and takes part."""
        if self.out_of_time(case.part, case.name):
            return
        compiler, more = self.request.compiled and case.compiled, []
        if compiler:
            more = [Variant("compile", beside(self.stock), {"cache_implementation": "static"})]
        with fresh_inductor_cache() if compiler else contextlib.nullcontext():
            fail = partial(self.fail, part=case.part, case=case.name)
            found = interleaved(case, [*self.variants, *more], self.device, self.clock.total / SHARE, fail)
        if compiler:
            del more
            torch.compiler.reset()
        self.add(case.part, case.about | found)
        self.release()

    def alone(self, part: str, name: str, row: Callable[[], dict]) -> None:
        """Adds a row, or tells what it failed by."""
        if self.out_of_time(part, name):
            return
        try:
            self.add(part, row())
        except Exception as error:  # as in turns
            self.fail(error, part=part, case=name, variant="")
        self.release()


def bench_language_model(request: LlmRequest, *args: Any) -> dict:
    """The result as one dict, ready for JSON; of an interrupted run, what it had.

    args: device, dtype, stage, keep, see `ModelRun`. Raises WrongResult before any figure, and what that raises.
    """
    run = GenerateRun(request, *args)
    try:
        _in_process(run)
    finally:
        run.variants.clear()
        del run.model, run.stock
        run.release()
    if run.begins("ready"):
        try:
            tokens = ("--tokens", str(request.context[0]))
            left = lambda: max(10.0, run.clock.left())  # noqa: E731
            found = measure_states(request.model, run.device, run.dtype, more=tokens, left=left)
            run.body["ready"] = {state: _ready(row) for state, row in found.items()}
        except RuntimeError as error:
            run.fail(error, part="ready", case=f"context {request.context[0]}", variant="")
    return run.result


def _ready(row: dict[str, Any]) -> dict[str, float]:
    """ready_s: `accel.optimize` and the first generate() beyond a steady one; optimize_s of it is the first part."""
    steady = steady_s(row)
    return {
        "ready_s": round(max(0.0, row["ready_s"] - steady), 3),
        "optimize_s": row.get("optimize_s", 0.0),
        "first_call_s": row["first_call_s"],
        "steady_call_s": round(steady, 4),
    }


@torch.no_grad()
def _in_process(run: GenerateRun) -> None:
    request, stock = run.request, run.stock
    traffic, bandwidth = Traffic.of(stock), copy_bandwidth(run.device)
    sizes = (request.batch, request.context, request.new_tokens, request.long, request.long_batch)
    work = Work(stock, traffic, bandwidth, run.device, *sizes)
    run.stage("correctness")
    run.about |= {
        "sizes": {
            "parameters": sum(p.numel() for p in stock.parameters()),
            "read_a_step_gb": round(traffic.step_bytes(1, 0) / 1e9, 4),
            "cache_a_token_kb": round(sum(each for each, _ in traffic.cached) / 1e3, 3),
            "attention": stock.config._attn_implementation,
        },
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        **_correct(run),
    }
    run.add_lossy(run.chosen)
    try:
        for part, made in IN_TURNS.items():
            if run.begins(part):
                for case in list(made(work)):
                    run.in_turns(case)
        if run.begins("memory"):
            for rows in sorted({request.batch[0], request.batch[-1]}):
                row = partial(single_calls.memory_row, work, run.variants[1], rows)
                run.alone("memory", f"batch {rows}", row)
        if run.begins("stalls"):
            for variant in run.variants:
                run.alone("stalls", variant.name, partial(single_calls.latency_row, work, variant))
    except KeyboardInterrupt:  # what was measured is worth having
        run.interrupted = True
    run.report()


def _correct(run: ModelRun) -> dict:
    """Optimizes the model; raises WrongResult where it computes something else, or is not undone exactly."""
    model = run.model
    inputs: dict[str, Any] = example_inputs(model)
    before, again = model(**inputs).logits, model(**inputs).logits
    optimize_s = seconds(lambda: accel.optimize(model), run.device)
    quality = accel.verify(model, **inputs)
    if not quality.passed:
        raise WrongResult(f"{quality.verdict} ({quality.agreement}); nothing was timed")
    after = accel.restore(model)(**inputs).logits
    equal = torch.equal(before, after) if torch.equal(before, again) else None
    if equal is False:
        raise WrongResult("after accel.restore the logits are not stock's any more")
    accel.optimize(model)
    return {"quality": quality.to_dict(), "restored_bit_equal": equal, "optimize_s": round(optimize_s, 3)}
