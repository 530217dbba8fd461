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


def denoise(scheduler, device="cpu", dtype=torch.float32, steps=6, start=None, begin=True, timesteps=None, **step):
    """A pipeline's loop around a made-up model: all samples, and what else the steps returned, on the host.

    start: where an image is taken in, as in image-to-image, with or without a call of set_begin_index.
    """
    mode = EmulatedDevice() if device == "meta" else None
    if mode is not None:
        with mode:
            outputs, accesses = _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step)
        return [output.value for output in outputs], accesses
    return _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step)


def _denoise(scheduler, mode, dtype, steps, start, begin, timesteps, step):
    device = "cpu" if mode is None else "meta"
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
    if mode is not None:
        mode.accesses.clear()
    for number, t in enumerate(left):
        given = scheduler.scale_model_input(sample, t) if hasattr(scheduler, "scale_model_input") else sample
        predicted = 0.8 * given + (0.1 + 0.01 * number) * drift
        sample, *more = scheduler.step(predicted, t, sample, **step, return_dict=False)
        outputs += [sample, *(output for output in more if output is not None)]
    return outputs, [] if mode is None else list(mode.accesses)


def _with_noise(scheduler, sample, noise, timesteps):
    if isinstance(sample, Far) and hasattr(scheduler, "sigmas"):  # they are indexed by a list, which is not emulated
        return EmulatedDevice.put(_with_noise(scheduler, sample.value, noise.value, timesteps.value))
    if hasattr(scheduler, "add_noise"):
        return scheduler.add_noise(sample, noise, timesteps)
    return scheduler.scale_noise(sample, timesteps, noise)


def equal(got, wanted) -> bool:
    return [x.dtype for x in got] == [x.dtype for x in wanted] and all(map(torch.equal, got, wanted))


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
