"""A ControlNet beside an optimized UNet: both are sped up, and the hint steers as it does in stock.

The ControlNet has random weights, so it steers nowhere useful; yours is `ControlNetModel.from_pretrained(...)`.
Run from the root of a checkout.
"""

import torch
from diffusers import ControlNetModel, DiffusionPipeline, StableDiffusionControlNetPipeline

import accel

base = DiffusionPipeline.from_pretrained("examples/models/tiny-sd-digits")
torch.manual_seed(0)
controlnet = ControlNetModel.from_unet(base.unet, conditioning_embedding_out_channels=(8, 8, 16, 16))
with torch.no_grad():
    for parameter in controlnet.parameters():  # one that is not trained has zeros at its ends, and steers nothing
        parameter += 0.05 * torch.randn_like(parameter)

pipe = StableDiffusionControlNetPipeline(**base.components, controlnet=controlnet)
pipe.to("cuda" if torch.cuda.is_available() else "cpu").set_progress_bar_config(disable=True)
hint = torch.zeros(1, 3, 64, 64)
hint[..., 16:48, 28:36] = 1  # a bar


def draw(scale: float) -> torch.Tensor:
    call = {"image": hint, "controlnet_conditioning_scale": scale, "num_inference_steps": 10, "output_type": "pt"}
    return pipe("a handwritten one", generator=torch.Generator().manual_seed(0), **call).images


stock = draw(1.0)
accel.optimize(pipe)
print("the hint moves the image by", f"{float((draw(1.0) - draw(0.0)).abs().max()):.2f}")
print("accel from stock, same hint:", f"{float((draw(1.0) - stock).abs().max()):.1e}")
patched = {path.split(".")[0] for path, _, status, _ in accel.report(pipe).sites if status == "patched"}
print("patched:", *sorted(patched))
