"""Whole pipeline calls, prompt in and PIL image out, as `accel bench FOLDER` times them; real sizes, random weights.

sd15, sdxl, flux or zimage, by each scheduler. `flux` and `zimage` begin with the prompt's embeddings. torch.compile,
with the first scheduler, gets the UNet and the decoder, or the blocks of a transformer that repeat. `--intervals` times
the lossy step cache too, with the last scheduler; what it loses only a trained model shows:
docs/measurements/images.md.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel.bench.compiled import Compiler, compile_blocks
from accel.bench.diffusion import runner
from accel.bench.diffusion.subject import Subject, of_pipeline
from accel.bench.machine import slug
from accel.bench.memory import release
from accel.bench.scripts import pipelines
from accel.bench.scripts.script import Size
from benchmarks.study import DEVICE, RESULTS, TOY, Study, numbers, words

SIZE = Size(DEVICE, TOY)
PNDM = {"skip_prk_steps": True, "steps_offset": 1}  # as the published pipelines have it


class Whole(NamedTuple):
    """A pipeline, the arguments of its call, how many steps, and the schedulers it is timed with."""

    build: Callable[[], tuple[Any, dict]]
    steps: int
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    changes: dict = {}  # noqa: RUF012

    def subject(self, scheduler: str) -> Subject:
        import diffusers

        pipe, given = self.build()
        pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config, **self.changes)
        steps = 2 if TOY else self.steps
        return of_pipeline(f"{scheduler}, {steps} steps", pipe, given | {"num_inference_steps": steps})


UNETS = {"prompt": pipelines.PROMPT}
EVERY = ("PNDMScheduler", "DDIMScheduler", "EulerDiscreteScheduler", "DPMSolverMultistepScheduler")
CLIPPED = {"clip_sample": False}
CASES = {
    "sd15": Whole(
        lambda: (pipelines.sd15(SIZE, scheduler=pipelines.scheduler("PNDMScheduler", **PNDM)), UNETS),
        50, EVERY, CLIPPED,
    ),
    "sdxl": Whole(
        lambda: (pipelines.sdxl(SIZE, force_upcast=True), UNETS), 30, ("EulerDiscreteScheduler",), CLIPPED
    ),
    "flux": Whole(lambda: (pipelines.flux(SIZE), pipelines.flux_prompt(SIZE)), 28),
    "zimage": Whole(lambda: pipelines.z_image(SIZE), 9),
}  # fmt: skip


def compiled_call(pipe: Any, inputs: list[dict]) -> Callable[[int], Any]:
    """A call of the pipeline, whose models are compiled."""
    if hasattr(pipe, "unet"):
        pipe.unet.forward = torch.compile(pipe.unet.forward, mode="reduce-overhead")
        pipe.vae.decoder.forward = torch.compile(pipe.vae.decoder.forward)
    else:
        compile_blocks(pipe.transformer)
    return partial(of_pipeline("", pipe, inputs[0]).call, pipe)


def main(cases: str, out: Path = RESULTS, compiled: bool = False, intervals: str = "", seconds: float = 20.0) -> None:
    """cases: names with commas between. out: a folder. intervals: whole steps one in so many, such as 2,3,5. seconds:
    about how long to time each.
    """
    for name in words(cases):
        case, path = CASES[name], out / f"{slug(DEVICE)}-{name}-call.json"
        dtype = SIZE.bf16 if case.changes == {} else SIZE.fp16
        record = Study(f"{name}-call", path, f"{name}, one image, PIL out; random weights", dtype=dtype, schedulers={})
        jobs: list[tuple[str, str, dict]] = [(scheduler, scheduler, {}) for scheduler in case.schedulers]
        last = case.schedulers[-1]
        jobs += [(f"{last}, step cache, interval {n}", last, {"step_cache": n}) for n in numbers(intervals)]
        for label, scheduler, options in jobs:
            compiler = Compiler("whole", compiled_call) if compiled and label == case.schedulers[0] else None
            with record.attempt(case=name, variant=label):
                make, given = partial(case.subject, scheduler), {"options": options, "compiler": compiler}
                found = runner.run(name, make, DEVICE, dtype, budget_s=0 if TOY else seconds, **given)
                record.body["schedulers"][label] = found
                record.show(label, {key: found.get(key) for key in ("stock", "compile", "accel", "error")})
            record.save()
            release(DEVICE)
