"""Whole pipeline calls, prompt in and PIL image out: stock, accel, torch.compile, at real sizes with random weights.

sd15, sdxl, flux or zimage, in one process a run. Images are compared first, then medians of wall-clock seconds, peak
memory, and seconds of the first calls, in which accel compiles kernels and captures graphs. `flux` and `zimage` begin
with the prompt's embeddings, and torch.compile gets the blocks of their transformer that repeat. `--intervals` times
the lossy step cache too, with the last scheduler; what it loses only a trained model shows:
docs/measurements/images.md.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import accel
from accel.bench.compiled import compile_blocks
from accel.bench.machine import slug
from accel.bench.memory import peak_mb, release
from accel.bench.scripts import pipelines
from accel.bench.scripts.script import Size
from accel.bench.timing import seconds
from accel.verification.metrics import compare
from benchmarks.study import DEVICE, RESULTS, TOY, Study, numbers, words

CALLS, STOCK_CALLS, SLOW_CALLS = (1, 1, 1) if TOY else (5, 3, 2)
SLOW_S = 2.0  # what takes so long is called SLOW_CALLS times
SIZE = Size(DEVICE, TOY)
PNDM = {"skip_prk_steps": True, "steps_offset": 1}  # as the published pipelines have it


class Whole(NamedTuple):
    """A pipeline, the arguments of its call, how many steps, and the schedulers it is timed with."""

    build: Callable[[], tuple[Any, dict]]
    steps: int
    schedulers: tuple[str, ...]
    changes: dict  # of their settings


UNETS = {"prompt": pipelines.PROMPT}
FLOW = ("FlowMatchEulerDiscreteScheduler",)
EVERY = ("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler")
CASES = {
    "sd15": Whole(
        lambda: (pipelines.sd15(SIZE, scheduler=pipelines.scheduler("PNDMScheduler", **PNDM)), UNETS),
        50, EVERY, {"clip_sample": False},
    ),
    "sdxl": Whole(
        lambda: (pipelines.sdxl(SIZE, force_upcast=True), UNETS),
        30, ("EulerDiscreteScheduler",), {"clip_sample": False},
    ),
    "flux": Whole(lambda: (pipelines.flux(SIZE), pipelines.flux_prompt(SIZE)), 28, FLOW, {}),
    "zimage": Whole(lambda: pipelines.z_image(SIZE), 9, FLOW, {}),
}  # fmt: skip


def timed(pipe: Any, given: dict, steps: int, calls: int = CALLS) -> dict:
    """First calls, then the median of later ones; the image of the last."""
    images: list = []

    def call() -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        images[:] = pipe(**given, num_inference_steps=steps, generator=generator).images

    first = [round(seconds(call, DEVICE), 3) for _ in range(3)]
    later = [seconds(call, DEVICE) for _ in range(calls if first[-1] < SLOW_S else SLOW_CALLS)]
    memory = peak_mb(DEVICE, call, call)
    return {"s": round(statistics.median(later), 4), "first_s": first, "peak_memory_mb": memory, "image": images[0]}


def compiled(pipe: Any, given: dict, steps: int) -> dict:
    """The same with torch.compile, which leaves the pipeline as it was."""
    whole = [pipe.unet, pipe.vae.decoder] if hasattr(pipe, "unet") else []
    for module in whole:
        module.forward = torch.compile(module.forward, mode="reduce-overhead" if module is pipe.unet else None)
    if not whole:
        compile_blocks(pipe.transformer)
    try:
        return timed(pipe, given, steps, STOCK_CALLS)
    finally:
        for module in whole:
            del module.forward
        for module in () if whole else pipe.transformer.modules():
            module._compiled_call_impl = None
        torch.compiler.reset()


def figures(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "image"}


def run(case: Whole, record: Study, compiler: bool, intervals: list[int]) -> None:
    """Fills `schedulers` of the record, a row each."""
    import diffusers

    (pipe, given), rows = case.build(), record.body["schedulers"]
    config, steps = pipe.scheduler.config, 2 if TOY else case.steps
    kinds = [getattr(diffusers, kind) for kind in case.schedulers]
    stock = {}
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, **case.changes)
        stock[kind] = timed(pipe, given, steps, STOCK_CALLS)
        rows[kind.__name__] = {"stock": figures(stock[kind])}
        record.save()
    if compiler:
        pipe.scheduler = kinds[0].from_config(config)
        with record.attempt(variant="compile"):
            rows[kinds[0].__name__]["compile"] = figures(compiled(pipe, given, steps))
    release(DEVICE)
    record.body["optimize_s"] = round(seconds(lambda: accel.optimize(pipe), DEVICE), 3)
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, **case.changes)
        ours = timed(pipe, given, steps)
        quality = compare(stock[kind]["image"], ours["image"])
        told = {"accel": figures(ours), "psnr_db": quality.psnr_db, "max_error": quality.max_error}
        rows[kind.__name__] |= told
        record.show(kind.__name__, rows[kind.__name__])
        record.save()
    for interval in intervals:
        accel.optimize(pipe, step_cache=interval)
        row = figures(timed(pipe, given, steps))
        rows[kinds[-1].__name__][f"accel, step cache, interval {interval}"] = row
        record.show(f"interval {interval}", row)
        record.save()
    report = accel.report(pipe).to_dict()
    record.body |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}


def main(cases: str, out: Path = RESULTS, compiled: bool = False, intervals: str = "") -> None:
    """cases: names with commas between. out: a folder. intervals: whole steps one in so many, such as 2,3,5."""
    for name in words(cases):
        dtype = SIZE.bf16 if CASES[name].schedulers == FLOW else SIZE.fp16
        about = f"{name}: {CASES[name].steps} steps, one image, PIL out; random weights"
        path = out / f"{slug(DEVICE)}-{name}-call.json"
        record = Study(f"{name}-call", path, about, dtype=dtype, schedulers={})
        with record.attempt(case=name):
            run(CASES[name], record, compiled, numbers(intervals))
        record.save()
        release(DEVICE)
