"""The pipeline that ships, and the reader of what it draws."""

import copy
import functools

import pytest
import torch

import accel
from support.diffusion.drawing import shipped
from support.diffusion.tiny_models import UNETS


@pytest.fixture(params=UNETS)
def family(request):
    """Every family of UNets in turn."""
    return request.param


@pytest.fixture
def twins(tiny):
    """(optimized, stock, inputs) of a UNet."""
    stock = tiny.unet()
    return accel.optimize(copy.deepcopy(stock)), stock, tiny.inputs(stock)


@pytest.fixture(scope="session")
def loaded():
    """Only to be copied."""
    return shipped()


@pytest.fixture
def pipe(loaded):
    """A pipeline of its own for every test."""
    return copy.deepcopy(loaded)


@pytest.fixture(scope="session")
def loaded_transformer():
    """The pipeline with a diffusion transformer; only to be copied."""
    return shipped(name="tiny-dit-digits")


@pytest.fixture
def dit(loaded_transformer):
    """One of its own for every test."""
    return copy.deepcopy(loaded_transformer)


@pytest.fixture(params=["pipe", "dit"])
def pipeline(request):
    """Both in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def digits():
    from support.diffusion import digits  # scikit-learn takes a second

    return digits


@pytest.fixture(scope="session")
def ten_digits(digits):
    """ten_digits(pipe, steps): (10, 3, H, W), one of each, as tensors."""

    def draw(pipe, steps: int = 20):
        generators = [torch.Generator().manual_seed(seed) for seed in range(10)]
        return pipe(digits.PROMPTS, generator=generators, num_inference_steps=steps, output_type="pt").images

    return draw


@pytest.fixture(scope="session")
def stock_digits(loaded, ten_digits):
    """What stock draws, by the number of steps."""
    return functools.cache(lambda steps=20: ten_digits(copy.deepcopy(loaded), steps))


@pytest.fixture
def cached(tiny, step_oracle):
    """A tiny UNet with the step cache, and an oracle of it."""

    def make(family="sd15", interval=3):
        model = tiny.unet(family)
        oracle = step_oracle(copy.deepcopy(model), interval)
        return accel.optimize(model, step_cache=interval), oracle

    return make


@pytest.fixture
def another(tiny, step_oracle):
    """One more oracle of the same UNet."""
    return lambda: step_oracle(tiny.unet(), 3)
