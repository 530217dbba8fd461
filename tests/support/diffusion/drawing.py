"""Pipelines that ship, and what they draw from seeds."""

from pathlib import Path

import numpy as np
import torch

SEVEN = "a handwritten seven"
DIGITS = Path(__file__).parents[3] / "examples" / "models" / "tiny-sd-digits"


def shipped(dtype=None, name=DIGITS.name):
    """A pipeline that ships, on the CPU."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(DIGITS.with_name(name), torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def same_image(ours, stock):
    """Within one step of the eight bits an image has."""
    assert ours.shape == stock.shape and np.isfinite(stock).all()
    assert np.abs(ours - stock).max() <= 1.01 / 255


def draw(pipe, prompts=SEVEN, steps=5, seed=0, **kwargs):
    prompts = [prompts] if isinstance(prompts, str) else prompts
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    call = {"num_inference_steps": steps, "output_type": "np", "generator": generators} | kwargs
    return pipe(prompts, **call).images
