"""SDXL with one line added: how long an image takes, what was changed, and whether the result is stock's.

    python examples/sdxl.py --model stabilityai/stable-diffusion-xl-base-1.0 --steps 30

--model is a model of the Hub or a folder; any SDXL fine-tune works.
"""

import argparse
import time

import torch
from diffusers import DiffusionPipeline

import accel

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
parser.add_argument("--prompt", default="an astronaut riding a horse, oil on canvas")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--out", default="sdxl.png")
given = parser.parse_args()

on_gpu = torch.cuda.is_available()
pipe = DiffusionPipeline.from_pretrained(given.model, dtype=torch.float16 if on_gpu else torch.float32)
pipe.to("cuda" if on_gpu else "cpu").set_progress_bar_config(disable=True)

accel.optimize(pipe)  # the one line

for number in range(3):  # kernels are compiled in the first call, CUDA graphs captured in the first and the second
    start = time.perf_counter()
    image = pipe(given.prompt, num_inference_steps=given.steps, generator=torch.Generator().manual_seed(0)).images[0]
    print(f"image {number + 1}: {time.perf_counter() - start:.2f} s")
image.save(given.out)
print(accel.report(pipe).summary())
print(accel.verify(pipe, given.prompt, num_inference_steps=4))
