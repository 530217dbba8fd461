"""Schedulers in pipelines, and their numbers beside stock's."""

import copy

import numpy as np
import pytest
import torch

import accel
from accel.diffusion.pipeline import LoopStart
from accel.diffusion.schedulers import LINEAR, SchedulerStep
from accel.fusion.loop import DenoisingLoop
from accel.planning.plan import PLAN, Plan
from support.diffusion.scheduler_cases import NAMES, V, all_cases, label, split
from support.diffusion.scheduler_loops import (
    denoise,
    equal,
    foreign_schedulers,
    largest_error,
    make,
    optimized,
    pickled,
)
from support.everything import EVERYTHING, always


def draw(pipe, **kwargs):
    call = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(0), "output_type": "np"} | kwargs
    return pipe("a handwritten five", **call).images


def rows(pipe):
    return [site for site in accel.report(pipe).sites if site[0] == "scheduler"]


def loops(pipe) -> int:
    return vars(pipe)["progress_bar"].context.of(DenoisingLoop).number


@pytest.mark.turns(2)
def test_a_pipeline_is_optimized_and_restored_with_its_scheduler(pipe):
    draw(pipe)  # which leaves settings of the call in the pipeline, optimized or not
    before = dict(vars(pipe)), dict(vars(pipe.scheduler))
    accel.restore(accel.optimize(pipe))
    assert (vars(pipe), vars(pipe.scheduler)) == before
    accel.optimize(pipe)
    assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
    accel.optimize(pipe)
    assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
    draw(pipe)
    accel.restore(pipe)
    assert rows(pipe) == []
    assert vars(pipe) == before[0]
    assert set(vars(pipe.scheduler)) == set(before[1])


@pytest.mark.turns(2)
def test_the_call_is_as_before(pipe, capsys):
    """Progress bar and its settings, loops counted, callbacks; a progress bar of the user's own stays in use."""
    accel.optimize(pipe)
    pipe.set_progress_bar_config(disable=False, desc="drawing")
    assert loops(pipe) == 0
    for number in (1, 2):
        draw(pipe)
        assert loops(pipe) == number
    assert "drawing: 100%" in capsys.readouterr().err
    assert [*pipe.progress_bar([1, 2])] == [1, 2]
    accel.restore(pipe)
    calls = []
    pipe.progress_bar = lambda **kwargs: calls.append(kwargs) or type(pipe).progress_bar(pipe, **kwargs)
    own = vars(pipe)["progress_bar"]
    draw(accel.optimize(pipe))
    assert calls == [{"total": 3}]
    assert vars(accel.restore(pipe))["progress_bar"] is own


@pytest.mark.turns(2)
def test_another_scheduler_is_noticed(pipe):
    from diffusers import EulerDiscreteScheduler, UniPCMultistepScheduler

    first = pipe.scheduler
    accel.optimize(pipe)
    swapped = [kind.from_config(first.config) for kind in (EulerDiscreteScheduler, UniPCMultistepScheduler)]
    before = [set(vars(scheduler)) for scheduler in swapped]
    for scheduler in swapped:
        pipe.scheduler = scheduler
        assert rows(pipe) == []
        ours = draw(pipe)
        assert rows(pipe) == [("scheduler", "scheduler", "patched", "")]
        assert isinstance(vars(scheduler)["step"], SchedulerStep) and isinstance(vars(first)["step"], SchedulerStep)
        pipe.scheduler = type(scheduler).from_config(first.config)
        accel_images, pipe.scheduler = draw(pipe), scheduler
        assert np.array_equal(ours, accel_images)
    pipe.scheduler = first
    draw(pipe)
    accel.restore(pipe)
    assert "step" not in vars(first)
    for scheduler, names in zip(swapped, before, strict=True):
        assert not any(isinstance(value, SchedulerStep | Plan) for value in vars(scheduler).values())
        assert set(vars(scheduler)) >= names


def test_swapped_and_restored_before_the_next_call(pipe):
    first = pipe.scheduler
    accel.optimize(pipe)
    pipe.scheduler = type(first).from_config(first.config)
    accel.restore(pipe)
    assert PLAN not in vars(first) and "step" not in vars(first)
    assert PLAN not in vars(pipe.scheduler)


def test_a_foreign_scheduler_put_in_later(pipe):
    accel.optimize(pipe, strict=True)
    (mine, reason), *_ = foreign_schedulers()
    pipe.scheduler = mine
    draw(pipe)
    assert rows(pipe)[0][2] == "skipped" and reason in rows(pipe)[0][3]


@pytest.mark.turns(2)
def test_a_scheduler_shared_by_two_pipelines(pipe):
    from diffusers import StableDiffusionImg2ImgPipeline

    before = set(vars(pipe.scheduler))
    accel.optimize(pipe)
    other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    assert rows(other) == rows(pipe) != []
    accel.optimize(other)
    accel.restore(pipe)
    assert set(vars(pipe.scheduler)) == before
    draw(pipe)
    accel.restore(other)
    assert set(vars(pipe.scheduler)) == before and "progress_bar" not in vars(other)


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
@pytest.mark.turns(2)
def test_a_copy_of_a_pipeline_stands_alone(pipe, way):
    from diffusers import EulerDiscreteScheduler

    accel.optimize(pipe)
    wanted = draw(pipe)
    twin = way(pipe)
    start = vars(twin)["progress_bar"]
    assert isinstance(start, LoopStart) and start.pipe is twin and start.current["scheduler"] is twin.scheduler
    accel.restore(pipe)
    assert rows(twin) and vars(twin.scheduler)["step"].scheduler is twin.scheduler
    assert np.array_equal(draw(twin), wanted)
    assert loops(twin) == 1  # a copy counts its own
    twin.scheduler = EulerDiscreteScheduler.from_config(twin.scheduler.config)
    draw(twin)
    assert rows(twin)
    accel.restore(twin)
    assert "progress_bar" not in vars(twin) and "step" not in vars(twin.scheduler)


def test_fallbacks_are_told_once_and_of_the_right_part(pipe):
    accel.optimize(pipe)
    pipe.unet.train()
    draw(pipe)
    assert {path.partition(".")[0] for path, _, _ in accel.report(pipe).fallbacks} == {"unet"}


def check(got, wanted, scheduler, dtype=torch.float32, **call):
    """Equal; UniPC, which is added up in another order, is as near to the same in float64 as stock is."""
    assert all(torch.isfinite(output).all() for output in wanted)
    if not any(hasattr(scheduler, update) for update in LINEAR):
        assert equal(got, wanted)
        return
    exact, _ = denoise(scheduler, dtype=torch.float64, **call)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    assert largest_error(got, exact) <= 2 * largest_error(wanted, exact) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("name", "case"), all_cases(), ids=label)
@pytest.mark.share(12)
@pytest.mark.turns(2)
def test_every_option(name, case):
    config, call = split(case)
    scheduler = make(name, **config)
    wanted, _ = denoise(copy.deepcopy(scheduler), **call)
    ours, plan = optimized(scheduler)
    on_host, _ = denoise(ours, **call)
    assert equal(on_host, wanted)
    got, accesses = denoise(ours, "meta", **call)
    assert accesses == []
    check(got, wanted, scheduler, **call)
    assert plan.log.rows() == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(5)
def test_stock_is_seen_to_read(name):
    """The emulated device tells: else all of the above would hold for stock too."""
    scheduler = make(name)
    wanted, _ = denoise(copy.deepcopy(scheduler))
    got, accesses = denoise(scheduler, "meta")
    assert {"nonzero", "_local_scalar_dense"} & set(accesses)
    assert equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", always(NAMES, "UniPCMultistep"))
@pytest.mark.share(8)
def test_half_precision(name, dtype):
    scheduler = make(name)
    wanted, _ = denoise(copy.deepcopy(scheduler), dtype=dtype)
    got, accesses = denoise(optimized(scheduler)[0], "meta", dtype)
    assert accesses == []
    check(got, wanted, scheduler, dtype)


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        (name, begin)
        for turn, name in enumerate(NAMES)
        for begin in (True, False)
        if EVERYTHING or begin is (turn % 2 > 0)
    ],
)
@pytest.mark.share(6)
def test_image_to_image(name, begin):
    """A slice of the timesteps, an image with noise added; twice, with another number of steps, then from the start."""
    scheduler = make(name)
    ours, _ = optimized(scheduler)
    for call in ({"start": 2, "begin": begin}, {"start": 4, "steps": 9, "begin": begin}, {}, {"steps": 3}):
        if name == "LCM" and "start" in call:
            call = call | {"timesteps": {"num_inference_steps": call.get("steps", 6), "strength": 1.0}}
        if name == "PNDM" and call.get("steps") == 3:
            continue  # stock's Runge-Kutta steps need more
        wanted, _ = denoise(scheduler, **call)
        got, accesses = denoise(ours, "meta", **call)
        assert accesses == []
        check(got, wanted, copy.deepcopy(scheduler), **call)


def test_continuous_timesteps():
    """torch.Tensor(list of tensors), in set_timesteps, is not emulated: on the host only."""
    scheduler = make("EulerDiscrete", timestep_type="continuous", sigma_min=0.002, sigma_max=700.0, **V)
    assert equal(denoise(optimized(scheduler)[0])[0], denoise(scheduler)[0])
