"""What the first calls of new sizes cost: image sizes and batches one after another, caches cold.

Stock and accel in a process of their own each, so that neither finds libraries loaded by the
other, and with empty caches of kernels and choices. The first shape is left out of what is told: its call is the cold
start. Every output is compared with stock's. Seconds of parts are those of `accel bench ready`.
"""

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import accel
from accel.bench.diffusion.cases import CASES
from accel.bench.machine import slug
from accel.bench.processes import spawn
from accel.bench.ready.parts import PartTimes
from accel.bench.timing import seconds
from accel.comparison import relative_rms
from accel.diffusion.inputs import unet_inputs
from benchmarks.study import DEVICE, RESULTS, TOY, Study, words

SEED = 17
UNSETTLED, SETTLED = 7, 3  # the first calls are told one by one, the others by their median
# By a model's dtype, relative, of the root mean square: rounded twice, in another order.
ERRORS = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3}

# (batch, height, width of the latents, tokens of the prompt); the first is the cold start
IMAGES = (
    (2, 64, 64, 77), (2, 96, 96, 77), (2, 48, 48, 77), (2, 64, 96, 77), (2, 96, 64, 77), (2, 72, 72, 77),
    (2, 80, 56, 77), (1, 64, 64, 77), (4, 64, 64, 77), (8, 64, 64, 77), (2, 40, 72, 77), (2, 32, 32, 77),
    (2, 104, 64, 77), (2, 64, 112, 77), (2, 56, 56, 77), (6, 48, 64, 77), (2, 88, 88, 77), (2, 128, 128, 77),
    (1, 96, 136, 77), (2, 60, 84, 77), (2, 64, 64, 154), (2, 76, 44, 231), (3, 120, 72, 77), (16, 32, 40, 77),
    (2, 52, 68, 77),
)  # fmt: skip
Shape = tuple[int, ...]


def sized(case: str) -> tuple[Any, dict[Shape, Callable[[], torch.Tensor]]]:
    dtype = torch.float32 if TOY else torch.float16
    made, model = CASES[case], CASES[case].build(DEVICE, dtype)

    def call(batch: int, height: int, width: int, tokens: int) -> Callable[[], torch.Tensor]:
        given = unet_inputs(model.config, DEVICE, dtype, batch=batch, size=max(height, width), tokens=tokens)
        given["sample"] = given["sample"][:, :, :height, :width].contiguous()
        return lambda: made.call(model, given)

    return model, {shape: call(*shape) for shape in (IMAGES[1:4] if TOY else IMAGES)}


def measure(case: str, variant: str, outputs: Path) -> None:
    """Prints rows of this variant; stock leaves its outputs there, and accel's are compared with them."""
    model, calls = sized(case)
    parts, (cold, *shapes) = PartTimes(), calls
    random.Random(SEED).shuffle(shapes)
    rows, found = [], []
    if variant == "accel":
        parts.watch()
        accel.optimize(model)
    for shape in (cold, *shapes):
        first = []
        for _ in range(1 if variant == "stock" else UNSETTLED):  # of stock's calls the first is the slow one
            parts.seconds = {}
            taken = seconds(calls[shape], DEVICE)
            first.append({"s": round(taken, 4)} | parts.told(taken))
        steady = statistics.median(seconds(calls[shape], DEVICE) for _ in range(SETTLED))
        found.append(calls[shape]())
        rows.append({"shape": shape, "steady_s": round(steady, 5), "calls": first})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if variant == "stock":
        torch.save(found, outputs)
    else:
        for row, got, wanted in zip(rows, found, torch.load(outputs, map_location=DEVICE), strict=True):
            row["error"] = relative_rms(got, wanted)
            if not row["error"] < ERRORS[model.dtype]:
                raise SystemExit(f"{case}, {row['shape']}: the output is {row['error']:.1e} from stock's")
    print(json.dumps(rows))


def beyond(stock: list[dict], accel: list[dict]) -> dict:
    """Seconds that a call of a new shape takes beyond stock's first call of it: the worst, the median, of all."""
    found = {}
    for index, name in enumerate(("first", "second", "third", "fourth")):
        times = [a["calls"][index]["s"] - s["calls"][0]["s"] for s, a in zip(stock[1:], accel[1:], strict=True)]
        found[f"{name}_worst_s"], found[f"{name}_median_s"] = round(max(times), 3), round(statistics.median(times), 3)
    return found


def main(cases: str = "sd15", out: Path = RESULTS, alone: str = "", outputs: Path | None = None) -> None:
    """out: a folder. alone, outputs: as this process calls itself: one variant, and where stock's outputs lie."""
    if alone:
        return measure(cases, alone, outputs)
    for case in words(cases):
        path = out / f"{slug(DEVICE)}-new-sizes-{case}.json"
        record = Study(case, path, "first calls of new sizes, seconds", stock=[], accel=[])
        with tempfile.TemporaryDirectory(prefix="accel-sizes-") as shared:
            for variant in ("stock", "accel"):
                with tempfile.TemporaryDirectory(prefix="accel-sizes-") as caches:
                    given = ["new-sizes", "--cases", case, "--alone", variant, "--outputs", f"{shared}/outputs.pt"]
                    record.body[variant] = spawn("benchmarks", given, Path(caches))
                record.save()
        record.body["error"] = max(row["error"] for row in record.body["accel"])
        record.keep_rows({"beyond stock's first call": beyond(record.body["stock"], record.body["accel"])})
