"""A model of the user's own, saved in a folder: the whole call of a pipeline, or the forward of a single model.

There is one copy of it, so that what fits stock fits here: stock is timed before `accel.optimize` and again after
`accel.restore`, with accel between, and a machine that grows slower or faster on the way favors neither.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accel
from accel import saved
from accel.bench.case import SEED, shapes
from accel.bench.machine import provenance
from accel.bench.memory import peak_mb, release
from accel.bench.runner import WrongResult
from accel.bench.timing import Timing, burst, seconds
from accel.diffusion.inputs import denoiser_inputs, example_call
from accel.patching.rule import set_data
from accel.planning.targets import models_in
from accel.verification.metrics import Quality, tensors

STAGES = ("loading", "stock", "accel: correctness and memory", "accel", "stock again")
STEPS = 20
WARM_UP = 3  # a decoder is called once an image: eagerly, then captured, then replayed
LEAST, MOST = 3, 40  # timed calls


class Subject:
    """What is timed: a pipeline with its call, or a model with its inputs, always from the same seed."""

    def __init__(self, obj: Any, prompt: str | None, steps: int | None, size: int | None, batch: int | None) -> None:
        self.obj, self.pipeline = obj, not isinstance(obj, nn.Module)
        if not self.pipeline:
            if prompt is not None or steps is not None:
                raise ValueError("prompt and steps are for pipelines; this is a single model")
            self.kwargs = denoiser_inputs(obj, batch, size)
            self.about = f"{type(obj).__name__}, one forward"
            return
        known = inspect.signature(type(obj).__call__).parameters
        call = example_call(obj) | {"num_inference_steps": steps or STEPS}
        asked = {"prompt": prompt, "height": size, "width": size}
        unknown = [name for name, value in asked.items() if value is not None and name not in known]
        if unknown:
            raise ValueError(f"a {type(obj).__name__} takes no {' and no '.join(unknown)}")
        call |= {name: value for name, value in asked.items() if value is not None}
        if batch is not None and "prompt" in call:
            call["prompt"] = [call["prompt"]] * batch
        elif batch is not None:
            call["batch_size"] = batch
        self.kwargs, self.seeded = call, "generator" in known
        self.about = f"{type(obj).__name__}, {call['num_inference_steps']} steps, batch {batch or 1}"

    def __call__(self) -> Any:
        if self.pipeline and self.seeded:
            return self.obj(**self.kwargs, generator=torch.Generator("cpu").manual_seed(SEED))
        devices = [self.obj.device] if self.obj.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(SEED)
            return self.obj(**self.kwargs)

    def output(self) -> list[torch.Tensor]:
        return tensors(self())

    def verify(self) -> Quality:
        """The same call judged; raises WrongResult where it does not pass."""
        quality = accel.verify(self.obj, seed=SEED, **self.kwargs)
        if not quality.passed:
            raise WrongResult(f"{quality.verdict}; nothing was reported")
        return quality


def bench_folder(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt: str | None = None,
    steps: int | None = None,
    size: int | None = None,
    batch: int | None = None,
    budget_s: float = 2.0,
    stage: Callable[[str], None] = lambda name: None,
) -> dict:
    """Times the model of a folder stock and optimized; the result has the shape that those of cases have.

    prompt, steps: of a pipeline. size: of its images in pixels, or of a UNet's latents. batch: images a call.
    Raises ValueError or TypeError for a folder or model that cannot be run, WrongResult before any figure.
    """
    stage(STAGES[0])
    obj = saved.load_saved(folder, dtype, device)
    if hasattr(obj, "set_progress_bar_config"):
        obj.set_progress_bar_config(disable=True)
    _settle(obj)
    subject = Subject(obj, prompt, steps, size, batch)
    result = {
        "case": re.sub(r"[^A-Za-z0-9.]+", "-", folder.resolve().name).strip("-"),
        "about": subject.about,
        **provenance(device, dtype),
    }
    try:
        return result | _stock_accel_stock(subject, device, budget_s, stage)
    finally:
        release(device)


def _stock_accel_stock(subject: Subject, device: torch.device, budget_s: float, stage: Callable[[str], None]) -> dict:
    stage(STAGES[1])
    first_s = seconds(subject, device)
    stock = subject.output()
    repeatable = _equal(subject.output(), stock)
    stock_memory = peak_mb(device, subject, subject)
    before = _times(subject, device, budget_s / 2)

    stage(STAGES[2])
    in_process_s = seconds(lambda: (accel.optimize(subject.obj), subject()), device)
    quality = subject.verify()
    accel.restore(subject.obj)
    accel_memory = peak_mb(device, lambda: (accel.optimize(subject.obj), subject()), subject)
    accel.restore(subject.obj)

    stage(STAGES[3])
    accel.optimize(subject.obj)
    ours = _times(subject, device, budget_s)
    report = accel.report(subject.obj)

    stage(STAGES[4])
    accel.restore(subject.obj)
    equal = _equal(subject.output(), stock) if repeatable else None
    if equal is False:
        raise WrongResult("after accel.restore the output is not stock's any more")
    after = _times(subject, device, budget_s / 2)
    image = {} if not subject.pipeline else {"image": list(stock[0].shape)}
    return {
        "shapes": image or shapes(subject.kwargs),
        "error": _errors(quality),
        "quality": quality.to_dict(),
        "sites": dict(Counter(status for _, _, status, _ in report.sites)),
        "restored_bit_equal": equal,
        "peak_memory_mb": {"stock": stock_memory, "accel": accel_memory},
        "ready": {"in_process_s": round(in_process_s, 3), "stock_first_call_s": round(first_s, 3)},
        "stock": Timing.of(before + after).to_dict(),
        "stock_halves_ms": [Timing.of(half).to_dict()["median_ms"] for half in (before, after)],
        "accel": Timing.of(ours).to_dict(),
        "graphs": report.to_dict()["graphs"],
        "fallbacks": report.to_dict()["fallbacks"],
    }


def _settle(obj: Any) -> None:
    """Moves weights out of the file they are mapped from, to where torch allocates; on a GPU they are there already.

    They lie at odd addresses in it, and matrix products on a CPU round by address: stock would not equal itself.
    """
    for model in models_in(obj).values():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                set_data(tensor, torch.clone)


def _times(subject: Subject, device: torch.device, budget_s: float) -> list[float]:
    """Milliseconds of calls after a few to warm up."""
    for _ in range(WARM_UP):
        each = seconds(subject, device)
    calls = max(LEAST, min(MOST, int(budget_s / max(each, 1e-6))))
    return burst(lambda i: subject(), calls, device)


def _errors(quality: Quality) -> dict:
    """The worst model's error where it could be measured against full precision."""
    judged = [part for part in (quality, *quality.parts.values()) if part.measure.endswith("full precision")]
    errors = [part.error for part in judged if part.error is not None]
    worst = {"accel_vs_fp32": max(errors)} if errors else {}
    return {"measure": "relative RMS from full precision, of the worst model", "max_abs": quality.max_error} | worst


def _equal(outputs: list, others: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))
