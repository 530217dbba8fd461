"""Schedulers, and a pipeline's loop around a made-up model."""

import copy
import inspect
import pickle

import torch

from accel.diffusion.schedulers import RULES
from accel.options import Options
from accel.planning.plan import Plan, create_context
from support.diffusion.emulated_device import EmulatedDevice, Far

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def make(name: str, **config):
    import diffusers

    kind = getattr(diffusers, f"{name}Scheduler")
    known = inspect.signature(kind.__init__).parameters
    return kind(**{key: value for key, value in SD.items() if key in known}, **config)


def optimized(scheduler):
    """A patched copy of a scheduler, as part of a pipeline is: and its plan."""
    scheduler = copy.deepcopy(scheduler)
    plan = Plan(scheduler, RULES, create_context(Options()))
    plan.apply()
    return scheduler, plan


def denoise(scheduler, device="cpu", dtype=torch.float32, begins=None, **call):
    """A pipeline's loop around a made-up model: all samples and what else the steps returned, and what was read.

    device: "meta" is emulated; its outputs are the numbers on the host. begins: called before the first step.
    call: of `_denoise`.
    """
    if device != "meta":
        return _denoise(scheduler, device, dtype, begins or (lambda: None), **call), []
    with EmulatedDevice() as mode:
        outputs = _denoise(scheduler, device, dtype, mode.accesses.clear, **call)
        accesses = list(mode.accesses)
    return [output.value for output in outputs], accesses


def _denoise(scheduler, device, dtype, begins, steps=6, start=None, begin=True, timesteps=None, **step):
    """start: where an image is taken in, as in image-to-image, with or without a call of set_begin_index."""
    generator = torch.Generator().manual_seed(1)
    sample, noise, drift = (torch.randn(2, 4, 8, 8, generator=generator).to(dtype).to(device) for _ in range(3))
    scheduler.set_timesteps(**({"num_inference_steps": steps} if timesteps is None else timesteps), device=device)
    left = scheduler.timesteps
    if start is not None:
        left = left[start * scheduler.order :]
        if begin and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start * scheduler.order)
        sample = _with_noise(scheduler, sample, noise, left[:1].repeat(2))
    outputs = []
    torch.manual_seed(2)
    begins()
    for number, t in enumerate(left):
        given = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        predicted = 0.8 * given + (0.1 + 0.01 * number) * drift
        sample, *more = scheduler.step(predicted, t, sample, **step, return_dict=False)
        outputs += [sample, *(output for output in more if output is not None)]
    return outputs


def _with_noise(scheduler, sample, noise, timesteps):
    if isinstance(sample, Far) and hasattr(scheduler, "sigmas"):  # they are indexed by a list, which is not emulated
        return EmulatedDevice.put(_with_noise(scheduler, sample.value, noise.value, timesteps.value))
    if hasattr(scheduler, "add_noise"):
        return scheduler.add_noise(sample, noise, timesteps)
    return scheduler.scale_noise(sample, timesteps, noise)


def equal(got, wanted) -> bool:
    return [x.dtype for x in got] == [x.dtype for x in wanted] and all(map(torch.equal, got, wanted))


def largest_error(got, exact) -> float:
    """The largest error, relative to the largest value of its step."""
    return float(max(((x.double() - y).abs().max() / y.abs().max() for x, y in zip(got, exact, strict=True))))


def foreign_schedulers():
    from diffusers import DDIMScheduler, KarrasVeScheduler

    class Mine(DDIMScheduler):
        pass

    wrapped = DDIMScheduler()
    wrapped.step = lambda *args, **kwargs: DDIMScheduler.step(wrapped, *args, **kwargs)
    return [
        (Mine(), "Mine is not a scheduler of diffusers"),
        (wrapped, "DDIMScheduler.step was replaced"),
        (KarrasVeScheduler(), "KarrasVeScheduler.step takes model_output, sigma_hat"),
    ]


def pickled(value):
    return pickle.loads(pickle.dumps(value))
