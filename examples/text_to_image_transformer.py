"""Text to image by a diffusion transformer, such as Flux or SD3: a stock diffusers script with one line added.

    python examples/text_to_image_transformer.py black-forest-labs/FLUX.1-dev "a cat on a red sofa"

The first argument is a model of the Hub or a folder, the second the prompt; without them the small model here draws.
"""

import sys
import time

import torch
from diffusers import DiffusionPipeline

import accel

given = dict(enumerate(sys.argv))
folder = given.get(1, "examples/models/tiny-dit-digits")
prompt = given.get(2, "a handwritten seven")
on_gpu = torch.cuda.is_available()
pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16 if on_gpu else torch.float32)
pipe.to("cuda" if on_gpu else "cpu").set_progress_bar_config(disable=True)

accel.optimize(pipe)  # the one line

for number in range(3):  # kernels are compiled in the first call, CUDA graphs captured in the first and the second
    start = time.perf_counter()
    image = pipe(prompt, num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images[0]
    print(f"image {number + 1}: {time.perf_counter() - start:.2f} s")
image.save("drawn.png")
print(accel.report(pipe).summary())
