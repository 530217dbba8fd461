"""Schedulers: no read of the device and no copy inside the loop, and stock's numbers to the bit."""

import copy

import pytest
import torch

from accel.diffusion.schedulers import LINEAR
from support.diffusion.scheduler_cases import NAMES, V, all_cases, label, split
from support.diffusion.scheduler_loops import denoise, equal, make, optimized
from support.everything import EVERYTHING, always


def error(got, exact) -> float:
    """The largest one, relative to the largest value of its step."""
    return float(max(((x.double() - y).abs().max() / y.abs().max() for x, y in zip(got, exact, strict=True))))


def check(got, wanted, scheduler, dtype=torch.float32, **call):
    """Equal; UniPC, which is added up in another order, is as near to the same in float64 as stock is."""
    assert all(torch.isfinite(output).all() for output in wanted)
    if not any(hasattr(scheduler, update) for update in LINEAR):
        assert equal(got, wanted)
        return
    exact, _ = denoise(scheduler, dtype=torch.float64, **call)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    assert error(got, exact) <= 2 * error(wanted, exact) + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("name", "case"), all_cases(), ids=label)
@pytest.mark.share(4)
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
    assert plan.ledger.rows() == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.share(3)
def test_stock_is_seen_to_read(name):
    """The emulated device tells: else all of the above would hold for stock too."""
    scheduler = make(name)
    wanted, _ = denoise(copy.deepcopy(scheduler))
    got, accesses = denoise(scheduler, "meta")
    assert {"nonzero", "_local_scalar_dense"} & set(accesses)
    assert equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", always(NAMES, "UniPCMultistep"))
@pytest.mark.share(4)
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
@pytest.mark.share(2)
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
