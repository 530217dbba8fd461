"""One language model, start to end: correctness first, then the parts asked for, as long as there is time."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import accel
from accel.bench.compiled import fresh_inductor_cache
from accel.bench.llm import cases, latency_spikes, memory, quantized
from accel.bench.llm.configs import CONFIGS
from accel.bench.llm.interleaved import TimedCase, Variant, interleaved
from accel.bench.llm.models import assistant, beside, build
from accel.bench.llm.traffic import Traffic, copy_bandwidth
from accel.bench.machine import provenance
from accel.bench.memory import release
from accel.bench.ready.states import measure_states, steady_s
from accel.bench.results import BenchRecord, WrongResult
from accel.bench.timing import seconds
from accel.llm.recording.inputs import example_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IN_TURNS = {"decode": cases.decode, "prefill": cases.prefill, "modes": cases.modes, "long": cases.long}
# Parts in their order, and the share of the time that is kept for each while those before it are at work.
PARTS = {"decode": 0.35, "prefill": 0.1, "modes": 0.2, "long": 0.1, "memory": 0.05, "stalls": 0.1, "ready": 0.1}
STAGES = ("building", "correctness", *PARTS)
SHARE = 40  # of the whole time, for the rounds of one case


@dataclass(frozen=True)
class BenchRequest:
    """What to measure. batches, contexts: of decoding; seconds: after so many nothing new is begun.

    compiled: beside them the stock model with its static cache, which generate() then compiles. weights: schemes of
    quantized weights. kv_cache: kinds of rounded caches. activations: kinds of rounded activations, with weights of the
    same kind. Each of these, and each pair with a cache, is a variant of its own in what is timed in turns.
    """

    model: str
    device: torch.device
    dtype: torch.dtype
    parts: tuple[str, ...] = tuple(PARTS)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    new_tokens: int = 64
    long: int = 32768
    compiled: bool = False
    seconds: float = 280.0
    weights: tuple[str, ...] = ()
    kv_cache: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    long_batches: tuple[int, ...] = (1,)

    @property
    def variants(self) -> list[tuple[str, dict[str, str]]]:
        """Name and options of each that is lossy."""
        return list(quantized.chosen(self.weights, self.kv_cache, self.activations))

    @property
    def name(self) -> str:
        if self.model in CONFIGS:
            return self.model
        return re.sub(r"[^A-Za-z0-9.]+", "-", Path(self.model).resolve().name).strip("-")


class BenchRun(BenchRecord):
    """A result as it grows, part by part."""

    def __init__(self, request: BenchRequest, keep: Callable[[dict], object] = lambda result: None) -> None:
        super().__init__({}, {}, request.seconds, keep)
        self.request, self.interrupted = request, False

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

    def failing(self, part: str, case: str) -> Callable[[str, Exception], None]:
        """What is told of a variant that fails."""
        return lambda variant, error: self.fail(error, part=part, case=case, variant=variant)


def bench_language_model(
    request: BenchRequest,
    stage: Callable[[str], None] = lambda name: None,
    keep: Callable[[dict], object] = lambda result: None,
) -> dict:
    """The result as one dict, ready for JSON; of an interrupted run, what it had. keep: is given it as it grows.

    Raises WrongResult before any figure, KeyError, ValueError or TypeError for a model that cannot be made.
    """
    device = request.device
    going = BenchRun(request, keep)
    stage("building")
    model = build(request.model, device, request.dtype)
    going.about = {
        "case": f"{'quantized' if request.variants else 'llm'}-{request.name}",
        "about": f"generate() of {request.name}, {'random weights' if request.model in CONFIGS else 'saved weights'}",
        **provenance(device, request.dtype),
    }
    try:
        _in_process(request, going, model, stage)
    finally:
        del model
        _release(device)
    if "ready" in request.parts and not going.out_of_time("ready"):
        stage("ready")
        try:
            tokens = ("--tokens", str(request.contexts[0]))
            found = measure_states(
                request.model, device, request.dtype, more=tokens, left=lambda: max(10.0, going.clock.left())
            )
            going.body["ready"] = {state: _ready(row) for state, row in found.items()}
        except RuntimeError as error:
            going.fail(error, part="ready", case=f"context {request.contexts[0]}", variant="")
    return going.result


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
def _in_process(request: BenchRequest, going: BenchRun, model: "PreTrainedModel", stage: Callable[[str], None]) -> None:
    device = request.device
    stock = beside(model)
    traffic = Traffic.of(stock)
    bandwidth = copy_bandwidth(device)
    sizes = (request.batches, request.contexts, request.new_tokens, request.long, request.long_batches)
    work = cases.Work(stock, traffic, bandwidth, device, *sizes)
    stage("correctness")
    going.about |= {
        "sizes": {
            "parameters": sum(p.numel() for p in stock.parameters()),
            "read_a_step_gb": round(traffic.step_bytes(1, 0) / 1e9, 4),
            "cache_a_token_kb": round(sum(each for each, _ in traffic.cached) / 1e3, 3),
            "attention": stock.config._attn_implementation,
        },
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        **_correct(model, stock, device),
    }
    variants = [
        Variant("stock", stock, assistant=lambda: assistant(stock)),
        Variant("accel", model, assistant=lambda: accel.optimize(assistant(stock))),
    ]
    for name, options in request.variants:
        stage(f"quantizing to {name}")
        try:
            one, told = quantized.variant(stock, name, options, device)
        except Exception as error:  # one that cannot be made must not cost the others' figures
            going.fail(error, part="quantizing", case="", variant=name)
            _release(device)
            continue
        variants.append(one)
        going.about.setdefault("quantized", {})[name] = told
    try:
        _parts(request, going, work, variants, stage)
    except KeyboardInterrupt:  # what was measured is worth having
        going.interrupted = True
    report = accel.report(model).to_dict()
    going.about |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}
    going.about |= {"sites": dict(Counter(site["status"] for site in report["sites"]))}


def _parts(
    request: BenchRequest, going: BenchRun, work: cases.Work, variants: list[Variant], stage: Callable[[str], None]
) -> None:
    for part in (part for part in IN_TURNS if part in request.parts):
        if not going.out_of_time(part):
            stage(part)
            _turns(going, list(IN_TURNS[part](work)), variants)
    if "memory" in request.parts and not going.out_of_time("memory"):
        stage("memory")
        batches = sorted({request.batches[0], request.batches[-1]})
        _each(
            going, "memory", {f"batch {rows}": partial(memory.memory_row, work, variants[1], rows) for rows in batches}
        )
    if "stalls" in request.parts and not going.out_of_time("stalls"):
        stage("stalls")
        _each(
            going, "stalls", {variant.name: partial(latency_spikes.latency_row, work, variant) for variant in variants}
        )


def _correct(model: "PreTrainedModel", stock: "PreTrainedModel", device: torch.device) -> dict:
    """Optimizes the model; raises WrongResult where it computes something else, or is not undone exactly."""
    inputs: dict[str, Any] = example_inputs(model)
    before, again = model(**inputs).logits, model(**inputs).logits
    optimize_s = seconds(lambda: accel.optimize(model), device)
    quality = accel.verify(model, **inputs)
    if not quality.passed:
        raise WrongResult(f"{quality.verdict} ({quality.agreement}); nothing was timed")
    after = accel.restore(model)(**inputs).logits
    equal = torch.equal(before, after) if torch.equal(before, again) else None
    if equal is False:
        raise WrongResult("after accel.restore the logits are not stock's any more")
    accel.optimize(model)
    return {"quality": quality.to_dict(), "restored_bit_equal": equal, "optimize_s": round(optimize_s, 3)}


def _turns(going: BenchRun, chosen: list[TimedCase], variants: list[Variant]) -> None:
    """Times the cases of a part in turns; with the compiler, where asked for, those that name it."""
    device, budget_s = going.request.device, going.request.seconds / SHARE
    for case in chosen:
        if going.out_of_time(case.part, case.name):
            continue
        compiler, more = going.request.compiled and "compile" in (case.variants or ()), []
        if compiler:
            more = [Variant("compile", beside(variants[0].model), {"cache_implementation": "static"})]
        with fresh_inductor_cache() if compiler else contextlib.nullcontext():
            fail = going.failing(case.part, case.name)
            found = interleaved(case, [*variants, *more], device, budget_s, fail)
        if compiler:
            del more
            torch.compiler.reset()
        going.add(case.part, case.about | found)
        _release(going.request.device)


def _each(going: BenchRun, part: str, rows: dict[str, Callable[[], dict]]) -> None:
    """A row for each, those that fail told instead."""
    for name, row in rows.items():
        if going.out_of_time(part, name):
            continue
        try:
            going.add(part, row())
        except Exception as error:  # as in turns
            going.fail(error, part=part, case=name, variant="")
        _release(going.request.device)


def _release(device: torch.device) -> None:
    """Memory of the case before; an error that it left behind must not cost the figures of others."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):
            release(device)
