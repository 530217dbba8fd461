"""See what was changed, measure how far the results are apart, and undo it exactly. Run from the root of a checkout."""

import torch
from diffusers import DiffusionPipeline

import accel

pipe = DiffusionPipeline.from_pretrained("examples/models/tiny-sd-digits")
pipe.set_progress_bar_config(disable=True)


def draw() -> torch.Tensor:
    call = {"num_inference_steps": 10, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
    return pipe("a handwritten three", **call).images


stock = draw()
with accel.optimized(pipe):  # for this block only; the same as optimize(...) ... restore(...)
    print(accel.report(pipe))
    print("optimized against stock:", accel.verify(pipe, "a handwritten three", num_inference_steps=10))
print("bit-equal after the block:", torch.equal(draw(), stock))
