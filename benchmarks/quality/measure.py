"""What fewer bits lose of a model that was trained: perplexity on held-out text, and decibels layer by layer.

The model is a Llama on tiny-lm's tokens, such as examples/models/tiny-lm. Every way to store it is measured in float32
beside the model as it is; then again with outliers planted: some channels behind the norms are larger by 80 and the
weights that read them smaller, which changes nothing that the model computes. `as_run` is
`accel.optimize(model, **options)` in 16 bits (float32 on a CPU), on the kernels that a user's calls run on, with any of
its options; `calibrated` is that of models that `accel.quantize` made, with activations fixed or smoothed by text.
"""

import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from accel.bench.timing import Clock
from accel.bench.timing import seconds as taken
from benchmarks.quality.text import HELD_OUT, WINDOW, calibration, chapters, perplexity, windows
from benchmarks.quality.ways import CODES, FOUR_BITS, PLANTED, WAYS, Way, Ways, planted
from benchmarks.study import DEVICE, HALF, Study, words

AS_RUN = (
    {},
    *({"weights": name + head} for name in ("int8", "fp8", *FOUR_BITS) for head in ("", "-head")),
    *({"kv_cache": kind} for kind in CODES),
    {"weights": "int4", "kv_cache": "int8"},
    *({"weights": kind.partition("-")[0], "activations": kind} for kind in accel.options.ACTIVATIONS),
)
CALIBRATED = (
    {"scheme": "int8", "method": "rtn", "activations": "int8-static"},
    {"scheme": "int8", "method": "smoothquant", "activations": "int8"},
    {"scheme": "int8", "method": "smoothquant", "activations": "int8-static"},
    {"scheme": "int8", "method": "rtn", "activations": "int8-outliers-static"},
    {"scheme": "fp8", "method": "rtn", "activations": "fp8-static"},
)


def as_run(half: nn.Module, options: dict, rows: torch.Tensor) -> dict:
    model = copy.deepcopy(half)
    device = next(model.parameters()).device
    seconds = taken(lambda: accel.optimize(model, **options), device)
    report = accel.report(model)
    return {
        "perplexity": perplexity(model, rows),
        "optimize_s": round(seconds, 2),
        "weights_db": _span([row["sqnr_db"] for row in report.weights]),
        "fallbacks": dict(report.fallbacks),
    }


def calibrated(half: nn.Module, options: dict, batches: list[dict], rows: torch.Tensor) -> dict:
    model = accel.quantize(copy.deepcopy(half), calibration=batches, **options)
    return {"perplexity": perplexity(accel.optimize(model), rows)}


def _span(decibels: list[float]) -> dict | None:
    if not decibels:
        return None
    return {"least": round(min(decibels), 2), "median": round(statistics.median(decibels), 2)}


class Measured(Study):
    """Ways to run or store a model, each beside the perplexity of the model as it is."""

    def tell(self, part: str, about: dict, base: float, find: Callable[[], dict]) -> None:
        """One way that fails must not cost the others."""
        clock = Clock()
        if not self.in_time(part=part, **about):
            return
        with self.attempt(part=part, **about):
            found = find()
            change = found["perplexity"] / base - 1
            super(Study, self).add(part, about | found | {"change": change})
            self.show(part, about, f"{change:+.3%}", f"{clock.taken():.1f} s")


def of_ways(record: Measured, stock: nn.Module, batches: list[dict], rows: torch.Tensor, wanted: Callable) -> None:
    for kind, ways in (("as trained", WAYS), ("outliers planted", PLANTED)):
        if ways := [way for way in ways if wanted(way.name)]:
            measured = Ways(stock if kind == "as trained" else planted(stock), batches, rows)
            for way in (Way(), *ways) if measured.stock is not stock else ways:
                about = {"model": kind, "way": way.name} | asdict(way)
                record.tell("rows", about, record.about["perplexity"], partial(measured, way))


def of_runs(
    record: Measured, half: nn.Module, batches: list[dict], rows: torch.Tensor, wanted: Callable, more: list[dict]
) -> None:
    base = perplexity(half, rows)
    for kind in ("as trained", "outliers planted"):
        model = half if kind == "as trained" else planted(half)
        about = {"model": kind, "dtype": str(half.dtype).removeprefix("torch.")}
        for options in (*AS_RUN, *more):
            named = {"options": " ".join(f"{k}={v}" for k, v in options.items())}
            if wanted(" ".join(map(str, options.values()))) and (model is half or "activations" in options):
                record.tell("as_run", about | named, base, lambda model=model, o=options: as_run(model, o, rows))
        for options in CALIBRATED:
            if wanted(" ".join(options.values())):
                find = partial(calibrated, model, options, batches, rows)
                record.tell("calibrated", about | options, base, find)


def main(
    model: Path, out: Path, windows_of: int = 32, texts: int | None = None, only: str = "", seconds: float = 400.0,
    runs: bool = True, options: str = "[]",
) -> dict:  # fmt: skip
    """windows_of: calibration. texts: so many windows of the held-out text only. only: ways with one of these words,
    such as int4,gptq,kv. seconds: after so many nothing new is begun. runs: by accel.optimize too. options: more for
    it, such as [{"weights": "int8"}].
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE).eval()
    rows, batches = windows(tokenizer, chapters(HELD_OUT))[:texts], calibration(tokenizer, windows_of)
    training = model / "training.json"
    about = "perplexity on held-out text; weights and inputs emulated in float32, as_run by accel.optimize"
    record = Measured(f"quality-{model.resolve().name}", out, about, seconds, rows=[], as_run=[], calibrated=[])
    record.about |= {
        "parameters": stock.num_parameters(),
        "tokens": int((rows[:, 1:] >= 0).sum()),
        "calibration": f"{windows_of} windows of {WINDOW} tokens of text that the model was trained on",
        "training": json.loads(training.read_text()) if training.exists() else None,
        "perplexity": perplexity(stock, rows),
    }

    def wanted(name: str) -> bool:
        return not only or any(word in name.replace(",", "").split() for word in words(only))

    record.save()
    of_ways(record, stock, batches, rows, wanted)
    if runs:
        of_runs(record, stock.to(HALF), batches, rows, wanted, json.loads(options))
    return record.result
