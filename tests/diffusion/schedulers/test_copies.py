"""Shallow copies of an optimized scheduler, stepped in turns as panorama scripts do: each is a scheduler of its own."""

import copy

import pytest
import torch

import accel
from accel.planning.plan import plan_of
from support.diffusion.scheduler_cases import NAMES
from support.diffusion.scheduler_loops import equal, make, optimized
from support.diffusion.tiny_models import make_sdxl_pipeline


def with_its_dict(scheduler):
    twin = type(scheduler).__new__(type(scheduler))
    vars(twin).update(vars(scheduler))
    return twin


def in_turns(scheduler, copied):
    """Two samples, each stepped by a copy of its own, then one by the original."""
    scheduler.set_timesteps(4)
    schedulers = [copied(scheduler), copied(scheduler)]
    generator = torch.Generator().manual_seed(1)
    samples = list(torch.randn(2, 1, 4, 4, 4, generator=generator))
    outputs = []
    torch.manual_seed(2)
    for t in scheduler.timesteps:
        for i in range(len(samples)):
            x = samples[i]
            if hasattr(scheduler, "scale_model_input"):
                x = schedulers[i].scale_model_input(x, t)
            samples[i] = schedulers[i].step(0.8 * x, t, samples[i], return_dict=False)[0]
            outputs.append(samples[i])
    sample = outputs[0]
    for t in scheduler.timesteps:
        sample = scheduler.step(0.5 * sample, t, sample, return_dict=False)[0]
        outputs.append(sample)
    return outputs


@pytest.mark.parametrize("copied", [copy.copy, with_its_dict])
@pytest.mark.parametrize("name", NAMES)
def test_copies_stepped_in_turns(name, copied):
    scheduler = make(name)
    ours, plan = optimized(scheduler)
    assert equal(in_turns(ours, copied), in_turns(copy.deepcopy(scheduler), copied))
    assert plan.ledger.rows() == [] and "step" in vars(ours)


def as_panoramas_do(scheduler):
    """Their one scheduler is given the state of each view before its step, and that is kept after it."""
    scheduler.set_timesteps(4)
    states = [copy.deepcopy(vars(scheduler))] * 2
    samples = list(torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(1)))
    outputs = []
    torch.manual_seed(2)
    for t in scheduler.timesteps:
        for i, state in enumerate(states):
            vars(scheduler).update(state)
            samples[i] = scheduler.step(0.8 * samples[i], t, samples[i], return_dict=False)[0]
            outputs.append(samples[i])
            states[i] = copy.deepcopy(vars(scheduler))
    return outputs


@pytest.mark.parametrize("name", ["DDIM", "UniPCMultistep", "EulerDiscrete"])
def test_a_state_that_is_kept_and_put_back(name):
    scheduler = make(name)
    ours, _ = optimized(scheduler)
    assert equal(as_panoramas_do(ours), as_panoramas_do(scheduler))
    assert plan_of(ours) is None and "step" not in vars(ours)


@pytest.mark.parametrize("copied", [copy.copy, with_its_dict])
def test_a_pipeline_that_holds_a_copy(copied):
    """It is optimized at the next call as any other scheduler is, and restored with the pipeline, as is the first."""
    pipe = make_sdxl_pipeline()

    def draw(pipe):
        generator = torch.Generator().manual_seed(0)
        return pipe("a", num_inference_steps=3, height=16, width=16, output_type="np", generator=generator).images

    stock = copy.deepcopy(pipe)
    wanted = draw(stock)
    accel.optimize(pipe)
    first = pipe.scheduler
    draw(pipe)
    pipe.scheduler = copied(first)
    assert abs(draw(pipe) - wanted).max() < 1e-2
    assert plan_of(pipe.scheduler) is not None and vars(pipe.scheduler)["step"].owner is pipe.scheduler
    other = copy.copy(pipe)
    other.scheduler = copied(first)
    accel.restore(pipe)
    for scheduler in (first, pipe.scheduler):
        assert plan_of(scheduler) is None and "step" not in vars(scheduler)
    assert (draw(pipe) == wanted).all() and (draw(other) == wanted).all()
