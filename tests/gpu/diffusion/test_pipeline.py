"""The pipeline that ships, on a GPU in half precision: offload, schedulers, and digits that can still be read."""

import copy

import numpy as np
import pytest
import torch

import accel
from support.diffusion.drawing import shipped


@pytest.fixture
def pipe():
    return shipped(torch.float16)


def draw(pipe, prompts, **kwargs):
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    images = pipe(prompts, generator=generators, **({"num_inference_steps": 8} | kwargs)).images
    return np.stack([np.asarray(image) for image in images]) / 255, images


def alike(ours, stock):
    """Half precision on both sides: equal to the eye, and far closer than that on the whole."""
    assert ours.shape == stock.shape
    assert np.sqrt(((ours - stock) ** 2).mean()) < 5e-3


def test_digits_can_be_read(pipe):
    from support.diffusion import digits

    pipe.to("cuda")
    stock, images = draw(pipe, digits.PROMPTS, num_inference_steps=20)
    assert sum(np.equal(digits.read_digits(images), range(10))) >= 9
    accel.optimize(pipe, graphs=True)
    ours, images = draw(pipe, digits.PROMPTS, num_inference_steps=20)
    assert sum(np.equal(digits.read_digits(images), range(10))) >= 9
    alike(ours, stock)
    assert {row["path"] for row in accel.report(pipe).graphs if row["status"] == "graph"} >= {"unet", "text_encoder"}
    accel.restore(pipe)
    assert np.array_equal(draw(pipe, digits.PROMPTS, num_inference_steps=20)[0], stock)


@pytest.mark.parametrize("order", ["offload first", "optimize first"])
@pytest.mark.parametrize("kind", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offload(pipe, kind, order):
    stock, _ = draw(copy.deepcopy(pipe).to("cuda"), ["a handwritten five"])
    steps = [getattr(pipe, kind), lambda: accel.optimize(pipe)]
    for step in steps if order == "offload first" else reversed(steps):
        step()
    for _ in range(3):
        alike(draw(pipe, ["a handwritten five"])[0], stock)
    graphs = any(row["status"] == "graph" for row in accel.report(pipe).graphs)
    assert graphs == (kind == "enable_model_cpu_offload")  # whole models come to the same addresses each time
    accel.restore(pipe)
    alike(draw(pipe, ["a handwritten five"])[0], stock)


def test_optimize_before_moving_to_the_gpu(pipe):
    stock, _ = draw(copy.deepcopy(pipe).to("cuda"), ["a handwritten six"])
    accel.optimize(pipe, graphs=True)
    pipe.to("cuda")
    for _ in range(2):
        alike(draw(pipe, ["a handwritten six"])[0], stock)
    assert any(row["path"] == "unet" and row["status"] == "graph" for row in accel.report(pipe).graphs)
