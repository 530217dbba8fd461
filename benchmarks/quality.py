"""What fewer bits lose of a model that was trained: perplexity on held-out text, and decibels layer by layer.

    python benchmarks/quality.py MODEL OUT.json [--windows 32] [--only int8 kv ...]

MODEL: a Llama on tiny-lm's tokens, such as examples/models/tiny-lm or what `quality_model.py` saves. Every way to store
it is measured in float32 beside the model as it is; then again with outliers planted: some channels behind the norms
are larger by 80 and the weights that read them smaller, which changes nothing that the model computes. `as_run` is
`accel.optimize(model, **options)` in 16 bits (float32 on a CPU), on the kernels that a user's calls run on, with any of
its options; `calibrated` is that of models that `accel.quantize` made, with activations fixed or smoothed by text.
All is written as soon as it is known, so that an interrupted run leaves what it has.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from quality_text import HELD_OUT, WINDOW, calibration, chapters, perplexity, windows
from quality_ways import CODES, FOUR_BITS, PLANTED, WAYS, Way, Ways, planted
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import accel
from accel.bench.machine import commit, machine, now
from accel.bench.timing import seconds as taken

ACTIVATIONS = getattr(accel.options, "ACTIVATIONS", ())  # of versions that have them
AS_RUN = (
    {},
    *({"weights": name + head} for name in ("int8", "fp8", *FOUR_BITS) for head in ("", "-head")),
    *({"kv_cache": kind} for kind in CODES),
    {"weights": "int4", "kv_cache": "int8"},
    *({"weights": kind.partition("-")[0], "activations": kind} for kind in ACTIVATIONS),
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


def run(given: argparse.Namespace) -> dict:
    """The result, which lies in `given.out` as far as it is known."""
    given.out.parent.mkdir(parents=True, exist_ok=True)
    started, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    stock = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    rows, batches = windows(tokenizer, chapters(HELD_OUT)), calibration(tokenizer, given.windows)
    rows = rows if given.texts is None else rows[: given.texts]
    own = perplexity(stock, rows)
    training = given.model / "training.json"
    result = {
        "case": f"quality-{given.model.resolve().name}",
        "about": "perplexity on held-out text; weights and inputs emulated in float32, as_run by accel.optimize",
        "date": now(),
        "commit": commit(),
        "machine": machine(device),
        "parameters": stock.num_parameters(),
        "tokens": int((rows[:, 1:] >= 0).sum()),
        "calibration": f"{given.windows} windows of {WINDOW} tokens of text that the model was trained on",
        "training": json.loads(training.read_text()) if training.exists() else None,
        "perplexity": own,
        "rows": [],
        "as_run": [],
        "calibrated": [],
        "failed": [],
    }

    def told(part: str, about: dict, base: float, find) -> None:
        begun = time.monotonic()
        try:
            if begun - started > given.seconds:
                raise TimeoutError(f"{given.seconds:g} seconds were over")
            found = find()
        except Exception as error:  # one way that fails must not cost the others
            found = None
            result["failed"].append({"part": part, **about, "reason": f"{type(error).__name__}: {error}"[:300]})
            print(part, about, result["failed"][-1]["reason"], flush=True)
        if found is not None:
            result[part].append(about | found | {"change": found["perplexity"] / base - 1})
            print(part, about, f"{result[part][-1]['change']:+.3%}", f"{time.monotonic() - begun:.1f} s", flush=True)
        save()

    def save() -> None:
        result["took_s"] = round(time.monotonic() - started, 1)
        given.out.write_text(json.dumps(_finite(result), indent=2) + "\n")

    save()

    def wanted(name: str) -> bool:
        return not given.only or any(word in name.replace(",", "").split() for word in given.only)

    for kind, ways in (("as trained", WAYS), ("outliers planted", PLANTED)):
        ways = [way for way in ways if wanted(way.name)]
        if not ways:
            continue
        measured = Ways(stock if kind == "as trained" else planted(stock), batches, rows)
        for way in (Way(), *ways) if measured.stock is not stock else ways:
            about = {"model": kind, "way": way.name} | asdict(way)
            told("rows", about, own, lambda way=way, measured=measured: measured(way))
    half = stock.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    base = perplexity(half, rows)
    for kind in ("as trained", "outliers planted") if given.as_run else ():
        model = half if kind == "as trained" else planted(half)
        for options in (*AS_RUN, *given.options):
            about = {"model": kind, "options": " ".join(f"{k}={v}" for k, v in options.items())}
            if wanted(" ".join(map(str, options.values()))) and (model is half or "activations" in options):
                about["dtype"] = str(half.dtype).removeprefix("torch.")
                told("as_run", about, base, lambda model=model, options=options: as_run(model, options, rows))
        for options in CALIBRATED:
            if wanted(" ".join(options.values())):
                about = {"model": kind, **options, "dtype": str(half.dtype).removeprefix("torch.")}
                find = partial(calibrated, model, options, batches, rows)
                told("calibrated", about, base, find)
    return result


def tables(result: dict) -> Iterator[Table]:
    """Perplexities with the least and the median decibels of layers; then what ran in 16 bits."""
    shown = Table(title=f"{result['case']}: perplexity {result['perplexity']:.3f}", title_justify="left")
    for heading in ("model", "way", "change", "bytes", "layers dB least / median", "weights dB", "s"):
        shown.add_column(heading, justify="left" if heading in ("model", "way") else "right")
    for row in result["rows"]:
        layers, weights = (_span(list(row.get(key, {}).values())) for key in ("layers_db", "linears_db"))
        texts = [f"{s['least']:.1f} / {s['median']:.1f}" if s else "-" for s in (layers, weights)]
        share = f"{row['bytes_of_16_bits']:.0%}" if "bytes_of_16_bits" in row else "-"
        shown.add_row(row["model"], row["way"], f"{row['change']:+.3%}", share, *texts, str(row.get("seconds", "-")))
    yield shown
    if result["as_run"]:
        shown = Table("model", "options", "dtype", "perplexity", "change", title="accel.optimize", title_justify="left")
        for row in result["as_run"]:
            shown.add_row(
                row["model"], row["options"], row["dtype"], f"{row['perplexity']:.3f}", f"{row['change']:+.3%}"
            )
        yield shown


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--windows", type=int, default=32, help="of calibration")
    parser.add_argument("--texts", type=int, help="so many windows of the held-out text only")
    parser.add_argument("--only", nargs="+", default=[], help="ways with one of these words, such as int4 gptq kv")
    parser.add_argument("--seconds", type=float, default=400.0, help="after so many nothing new is begun")
    parser.add_argument("--as-run", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--options", type=json.loads, nargs="+", default=[], help='more for accel.optimize: \'{"weights": "int8"}\''
    )
    return parser.parse_args(given)


def main(given: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    with torch.no_grad():
        result = run(given)
    for table in tables(result):
        Console(width=150).print(table)
    return result


def _finite(value):
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main(arguments())
