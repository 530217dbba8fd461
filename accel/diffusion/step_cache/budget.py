"""The interval of the step cache from a quality in decibels, by drawing images and comparing them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from accel.diffusion.inputs import example_call
from accel.diffusion.step_cache.cache import NAME, StepCacheForward
from accel.errors import SkippedSite
from accel.options import decibels
from accel.planning.plan import Plan
from accel.verification.metrics import Quality, compare

LONGEST_INTERVAL = 10  # interval that is tried
SEEDS = (0, 1)  # the worse image counts
BLANK = 1e-3  # standard deviation, over its pixels in 0..1, of an image that shows nothing


def settle(obj: Any, plans: Iterable[Plan], wanted: int | str) -> list[tuple[Plan, str]]:
    """Once obj is patched with step_cache=wanted: finds the interval that keeps a quality, and puts it into the report.

    The pipeline draws two images with its default number of steps, first with every call whole. Then it draws them with
    intervals of 2, 3 and so on, until one is worse than wanted. Returns the plans to be made anew without a step
    cache, and why: no interval keeps the quality.

    Raises ValueError where obj has no denoiser, and for a quality where obj draws blank images or needs more than a
    text. With strict=True it also raises where no interval keeps the quality.
    """
    plans = [plan for plan in plans if any(row.rule == NAME for row in plan.rows)]
    if not plans:
        raise ValueError(
            f"step_cache={wanted!r}: there is no UNet and no diffusion transformer in this {type(obj).__name__}"
        )
    cached = [(plan, forward) for plan in plans if (forward := _forward(plan)) is not None]
    if isinstance(wanted, int) or not cached:
        return []
    interval, quality = _search(obj, [forward for _, forward in cached], wanted)
    if interval == 1:
        reason = f"no interval keeps {wanted}: 2 gives {_told(quality)}; every call is computed whole"
        if any(plan.options.strict for plan, _ in cached):
            raise SkippedSite(f"strict=True: {NAME}: {reason}")
        return [(plan, reason) for plan, _ in cached]
    for plan, forward in cached:
        forward.state.interval = interval
        told = {(forward.path, NAME): {"reason": f"{forward.note()}; measured {_told(quality)}"}}
        plan.rows = [replace(row, **told.get((row.path, row.rule), {})) for row in plan.rows]
    return []


def _search(pipe: Any, forwards: list[StepCacheForward], wanted: str) -> tuple[int, Quality]:
    """The longest interval that keeps the quality, and what it keeps; 1 where none does, and what 2 would."""
    try:
        call = example_call(pipe)
    except ValueError as error:
        raise ValueError(
            f"step_cache={wanted!r} is measured with a pipeline that draws from a text alone; "
            f"for a {type(pipe).__name__} give an interval, such as step_cache=3"
        ) from error
    del call["num_inference_steps"]
    whole = _draw(pipe, call, forwards, 1)
    if min(drawn.images.std(axis=(1, 2)).max() for drawn in whole) < BLANK:
        raise ValueError(f"step_cache={wanted!r}: cannot be measured, the pipeline draws a blank image of {call}")
    kept: list[Quality] = []  # by intervals of 2 and more
    for interval in range(2, LONGEST_INTERVAL + 1):
        pairs = zip(whole, _draw(pipe, call, forwards, interval), strict=True)
        quality = min((compare(*pair) for pair in pairs), key=lambda q: q.psnr_db)
        if not (quality.finite and quality.psnr_db >= decibels(wanted)):
            return interval - 1, (kept or [quality])[-1]
        kept.append(quality)
    return LONGEST_INTERVAL, kept[-1]


class Drawn(NamedTuple):
    """Images, or the frames of videos, as an array (N, H, W, C)."""

    images: Any


def _draw(pipe: Any, call: dict, forwards: list[StepCacheForward], interval: int) -> list[Drawn]:
    """What the pipeline draws, one a seed."""
    for forward in forwards:
        forward.state.interval = interval
    generators = (torch.Generator().manual_seed(seed) for seed in SEEDS)
    return [_images(pipe(**call, generator=generator, output_type="np")) for generator in generators]


def _images(output: Any) -> Drawn:
    drawn = getattr(output, "images", getattr(output, "frames", None))
    if drawn is None:
        raise ValueError(f"a {type(output).__name__} has neither images nor frames to measure a quality by")
    return Drawn(drawn.reshape(-1, *drawn.shape[-3:]))


def _forward(plan: Plan) -> StepCacheForward | None:
    values = [getattr(patch, "value", None) for patch in plan.patches]
    values += [getattr(value, "inner", None) for value in values]  # one that divides the call among ranks is around it
    return next((value for value in values if isinstance(value, StepCacheForward)), None)


def _told(quality: Quality) -> str:
    return f"PSNR {quality.psnr_db:.1f} dB" + ("" if quality.ssim is None else f", SSIM {quality.ssim:.3f}")
