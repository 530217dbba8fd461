"""The pipeline with a transformer that ships, on a GPU in half precision: digits that can still be read, and graphs."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import accel
from support.diffusion.drawing import draw

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-dit-digits"


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=str)
def pipe(request):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(FOLDER, torch_dtype=request.param)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to("cuda")


def rms(difference):
    return np.sqrt((difference.astype(np.float64) ** 2).mean())


def read(digits, images):
    return digits.read_digits([Image.fromarray((image * 255).round().astype(np.uint8)) for image in images])


def test_digits_can_be_read_and_go_through_graphs(pipe):
    from support.diffusion import digits

    exact = draw(copy.deepcopy(pipe).to(torch.float32), digits.PROMPTS, steps=20)
    stock = draw(pipe, digits.PROMPTS, steps=20)
    assert sum(np.equal(read(digits, stock), range(10))) >= 9
    accel.optimize(pipe, graphs=True)
    for _ in range(2):
        ours = draw(pipe, digits.PROMPTS, steps=20)
        assert sum(np.equal(read(digits, ours), range(10))) >= 9
        assert ours.shape == stock.shape and rms(ours - exact) <= 2 * rms(stock - exact)
    models = {row["path"] for row in accel.report(pipe).graphs if row["status"] == "graph"}
    assert models >= {"transformer", "text_encoder", "text_encoder_2", "text_encoder_3"}
    accel.restore(pipe)
    assert np.array_equal(draw(pipe, digits.PROMPTS, steps=20), stock)


def test_verify_passes(pipe):
    quality = accel.verify(accel.optimize(pipe, graphs=True), "a handwritten seven", num_inference_steps=8)
    assert quality.passed, str(quality)
    encoders = {"text_encoder", "text_encoder_2", "text_encoder_3"}
    assert set(quality.parts) == {"transformer", "vae.decoder", *encoders}
