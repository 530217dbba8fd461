"""Text to image: a stock diffusers script with one line added. Run from the root of a checkout."""

import sys

import torch
from diffusers import DiffusionPipeline

import accel

folder = sys.argv[1] if len(sys.argv) > 1 else "examples/models/tiny-sd-digits"  # or "stable-diffusion-v1-5/..."
on_gpu = torch.cuda.is_available()
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float16 if on_gpu else torch.float32)
pipe.to("cuda" if on_gpu else "cpu")

accel.optimize(pipe)  # the one line

image = pipe("a handwritten seven", num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images[0]
image.save("seven.png")
print(accel.report(pipe).summary())
