"""LoRA adapters added, mixed and switched off on an optimized pipeline: each image is the one that stock draws.

What an adapter touches runs its own layers while it is loaded, the rest stays fast. Run from the root of a checkout,
with `pip install peft`.
"""

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig

import accel

FOLDER = "examples/models/tiny-sd-digits"


def load() -> DiffusionPipeline:
    pipe = DiffusionPipeline.from_pretrained(FOLDER).to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe) -> torch.Tensor:
    call = {"num_inference_steps": 10, "output_type": "pt", "generator": torch.Generator().manual_seed(0)}
    return pipe("a handwritten five", **call).images


stock, fast = load(), accel.optimize(load())
plain = draw(stock)
for seed, name in enumerate(("bold", "slanted")):  # random ones; yours: pipe.load_lora_weights(..., adapter_name=name)
    for pipe in (stock, fast):
        torch.manual_seed(seed)
        pipe.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False), name)
for names, weights in ((["bold"], [0.3]), (["slanted"], [0.2]), (["bold", "slanted"], [0.2, 0.1]), ([], [])):
    for pipe in (stock, fast):
        pipe.set_adapters(names, weights) if names else pipe.disable_lora()
    ours, theirs = draw(fast), draw(stock)
    moved, apart = float((theirs - plain).abs().max()), float((ours - theirs).abs().max())
    print(f"{' + '.join(names) or 'none':15} moves the image by {moved:.3f}, accel from stock {apart:.1e}")
