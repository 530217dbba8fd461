"""Images of a pipeline from seeds."""

import torch

SEVEN = "a handwritten seven"


def draw(pipe, prompts=SEVEN, steps=6, seed=0, **kwargs):
    prompts = [prompts] if isinstance(prompts, str) else prompts
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    call = {"num_inference_steps": steps, "output_type": "np", "generator": generators} | kwargs
    return pipe(prompts, **call).images
