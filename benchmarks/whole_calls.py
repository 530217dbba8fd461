"""Whole pipeline calls, prompt in and PIL image out: stock, accel, torch.compile, at real sizes with random weights.

    python benchmarks/whole_calls.py sd15 sdxl flux zimage [--compile] [--intervals 2,3,5] [--out FOLDER]

One process a run; images compared first, then medians of wall-clock seconds, peak memory, and seconds of the first
calls, in which accel compiles kernels and captures graphs. `flux` and `zimage` begin with the prompt's embeddings, and
torch.compile gets the blocks of their transformer that repeat. `--intervals` times the lossy step cache too, with the
last scheduler; what it loses only a trained model shows: docs/measurements/images.md. What is measured is written as
soon as it is known, and accel or torch.compile that fails is told without the others' loss.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from call_pipelines import BUILDERS, build

import accel
from accel.bench.compiled import compile_blocks
from accel.bench.machine import commit, machine, now, slug
from accel.bench.memory import peak_mb, release
from accel.bench.timing import seconds
from accel.errors import told
from accel.verification.metrics import compare

CALLS, STOCK_CALLS, SLOW_CALLS = 5, 3, 2
SLOW_S = 2.0  # what takes so long is called SLOW_CALLS times
SCHEDULERS = {
    "sd15": ("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler"),
    "sdxl": ("EulerDiscreteScheduler",),
    "flux": ("FlowMatchEulerDiscreteScheduler",),
    "zimage": ("FlowMatchEulerDiscreteScheduler",),
}
STEPS = {"sd15": 50, "sdxl": 30, "flux": 28, "zimage": 9}
BF16 = ("flux", "zimage")


def timed(pipe, given: dict, steps: int, device: torch.device, calls: int = CALLS) -> dict:
    """First calls, then the median of later ones; the image of the last."""
    images = []

    def call():
        generator = torch.Generator(device).manual_seed(0)
        images[:] = pipe(**given, num_inference_steps=steps, generator=generator).images

    first = [round(seconds(call, device), 3) for _ in range(3)]
    later = [seconds(call, device) for _ in range(calls if first[-1] < SLOW_S else SLOW_CALLS)]
    memory = peak_mb(device, call, call)
    return {"s": round(statistics.median(later), 4), "first_s": first, "peak_memory_mb": memory, "image": images[0]}


def compiled(name: str, pipe, given: dict, device: torch.device) -> dict:
    """The same with torch.compile, which leaves the pipeline as it was."""
    if not hasattr(pipe, "unet"):
        compile_blocks(pipe.transformer)
        try:
            return timed(pipe, given, STEPS[name], device, STOCK_CALLS)
        finally:
            for module in pipe.transformer.modules():
                module._compiled_call_impl = None
            torch.compiler.reset()
    for module in (pipe.unet, pipe.vae.decoder):
        module.forward = torch.compile(module.forward, mode="reduce-overhead" if module is pipe.unet else None)
    try:
        return timed(pipe, given, STEPS[name], device, STOCK_CALLS)
    finally:
        del pipe.unet.forward, pipe.vae.decoder.forward
        torch.compiler.reset()


def run(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    result: dict,
    keep: Callable,
    compiler: bool = False,
    intervals: tuple[int, ...] = (),
) -> None:
    """Fill `result` with a row for each scheduler; keep: writes what is known so far."""
    import diffusers

    (pipe, given), rows = build(name, device, dtype), {}
    result["schedulers"] = rows
    config, steps = pipe.scheduler.config, STEPS[name]
    kinds = [getattr(diffusers, kind) for kind in SCHEDULERS[name]]
    changed = {} if name in BF16 else {"clip_sample": False}
    stock = {}
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, **changed)
        stock[kind] = timed(pipe, given, steps, device, STOCK_CALLS)
        rows[kind.__name__] = {"stock": _figures(stock[kind])}
        keep()
    if compiler:
        pipe.scheduler = kinds[0].from_config(config)
        try:
            rows[kinds[0].__name__]["compile"] = _figures(compiled(name, pipe, given, device))
        except Exception as error:
            result["compile_failed"] = told(error)
        keep()
    release(device)
    result["optimize_s"] = round(seconds(lambda: accel.optimize(pipe), device), 3)
    for kind in kinds:
        pipe.scheduler = kind.from_config(config, **changed)
        ours = timed(pipe, given, steps, device)
        quality = compare(stock[kind]["image"], ours["image"])
        rows[kind.__name__] |= {
            "accel": _figures(ours),
            "psnr_db": quality.psnr_db,
            "max_error": quality.max_error,
        }
        print(name, kind.__name__, json.dumps(rows[kind.__name__]), flush=True)
        keep()
    for interval in intervals:
        accel.optimize(pipe, step_cache=interval)
        row = _figures(timed(pipe, given, steps, device))
        rows[kinds[-1].__name__][f"accel, step cache, interval {interval}"] = row
        print(name, f"interval {interval}", json.dumps(row), flush=True)
        keep()
    report = accel.report(pipe).to_dict()
    result |= {"graphs": report["graphs"], "fallbacks": report["fallbacks"]}


def _figures(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "image"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=list(BUILDERS))
    parser.add_argument("--compile", action="store_true", help="time torch.compile too, minutes a case")
    parser.add_argument("--intervals", default="", help="whole steps one in so many, by the lossy step cache: 2,3,5")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    intervals = tuple(int(one) for one in options.intervals.split(",") if one)
    for name in options.cases:
        dtype = torch.bfloat16 if name in BF16 else torch.float16
        guidance = "one image" if name in BF16 else "one image with guidance"
        about = f"{name}: {STEPS[name]} steps, {guidance}, PIL out; random weights, {dtype}"
        result = {"case": f"{name}-call", "about": about, "date": now(), "commit": commit(), "machine": machine(device)}
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{slug(device)}-{name}-call.json"

        def keep(result: dict = result, path: Path = path) -> None:
            path.write_text(json.dumps(result, indent=1) + "\n")

        try:
            run(name, device, dtype, result, keep, options.compile, intervals)
        except Exception as error:  # the next case may go all the same
            result["failed"] = told(error)
            print(name, "failed:", result["failed"], flush=True)
        keep()
        release(device)


if __name__ == "__main__":
    main()
