"""Image to image with models that are optimized already: pipelines made from one another share them.

Draws a three, then lets the same models redraw it as an eight. Run from the root of a checkout.
"""

import torch
from diffusers import AutoPipelineForImage2Image, DiffusionPipeline

import accel

pipe = DiffusionPipeline.from_pretrained("examples/models/tiny-sd-digits")
pipe.to("cuda" if torch.cuda.is_available() else "cpu")
accel.optimize(pipe)
three = pipe("a handwritten three", num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images[0]

redraw = AutoPipelineForImage2Image.from_pipe(pipe)  # the same UNet, VAE and text encoder: nothing to optimize again
redraw.set_progress_bar_config(disable=True)
call = {"prompt": "a handwritten eight", "image": three, "strength": 0.7, "num_inference_steps": 20}
eight = redraw(**call, generator=torch.Generator().manual_seed(1)).images[0]

three.save("three.png")
eight.save("eight.png")
print("sites patched, seen from the new pipeline:", len(accel.report(redraw).sites))
print(accel.verify(redraw, **call))
