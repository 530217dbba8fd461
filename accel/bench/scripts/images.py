"""Scripts of diffusers' UNets: text to image and what people add to it."""

from typing import Any

import torch

from accel.bench.scripts.pipelines import PROMPT, add_lora, picture, sd15, sdxl
from accel.bench.scripts.script import Built, Size, script


def drawn(pipe: Any, size: Size, steps: int = 10, **given: Any) -> torch.Tensor:
    """Images of one call, from the same noise every time."""
    generator = torch.Generator("cpu").manual_seed(0)
    given = {"prompt": PROMPT, "num_inference_steps": size(steps, 2), "output_type": "pt"} | given
    return pipe(generator=generator, **given).images


def pixels(size: Size, real: int) -> dict:
    """Height and width of an image, as arguments."""
    return {"height": size(real, 64), "width": size(real, 64)}


@script("sdxl", "SDXL, 10 steps at 1024 px")
def large(size: Size) -> Built:
    pipe = sdxl(size)
    return pipe, lambda: drawn(pipe, size, **pixels(size, 1024))


@script("sdxl-lora", "SDXL, 10 steps, a LoRA of rank 16 loaded and not fused", packages=("peft",))
def large_lora(size: Size) -> Built:
    pipe = sdxl(size)
    add_lora(pipe.unet, rank=size(16, 4))
    return pipe, lambda: drawn(pipe, size, **pixels(size, 1024))


@script("sdxl-two-loras", "SDXL, 5 steps each with two LoRAs, set_adapters between the calls", packages=("peft",))
def two_loras(size: Size) -> Built:
    pipe = sdxl(size)
    for seed, name in enumerate(("pixel", "sketch")):
        add_lora(pipe.unet, name, size(16, 4), seed)

    def call() -> list[torch.Tensor]:
        images = []
        for name in ("pixel", "sketch"):
            pipe.set_adapters(name)
            images.append(drawn(pipe, size, 5, **pixels(size, 1024)))
        return images

    return pipe, call


@script("sdxl-ip-adapter", "SDXL, 10 steps with an IP-Adapter and its image's embeddings")
def ip_adapter(size: Size) -> Built:
    pipe = sdxl(size)
    width = size(1280, 32)
    pipe.unet._load_ip_adapter_weights([_ip_weights(pipe.unet, size, width)])
    pipe.unet.to(size.device, size.fp16)
    embeds = [size.randn(2, 1, width, dtype=size.fp16)]  # without and with the image
    return pipe, lambda: drawn(pipe, size, ip_adapter_image_embeds=embeds, **pixels(size, 1024))


def _ip_weights(unet: Any, size: Size, width: int) -> dict:
    """The file of an IP-Adapter: the projection of an image, and keys and values of each cross-attention."""
    inner, tokens = unet.config.cross_attention_dim, 4
    image: dict[str, tuple[int, ...]] = {"proj.weight": (tokens * inner, width), "proj.bias": (tokens * inner,)}
    image |= {"norm.weight": (inner,), "norm.bias": (inner,)}
    crossing = [unet.get_submodule(path.removesuffix(".processor")) for path in unet.attn_processors if "attn2" in path]
    adapter = {
        f"{2 * number + 1}.to_{kind}_ip.weight": (attention.to_q.out_features, inner)
        for number, attention in enumerate(crossing)
        for kind in "kv"
    }
    made = [
        {name: 0.02 * size.randn(*shape, dtype=size.fp16, seed=seed) for seed, (name, shape) in enumerate(part.items())}
        for part in (image, adapter)
    ]
    return {"image_proj": made[0], "ip_adapter": made[1]}


@script("sd15", "SD1.5, 10 steps at 512 px")
def small(size: Size) -> Built:
    pipe = sd15(size)
    return pipe, lambda: drawn(pipe, size, **pixels(size, 512))


@script("sd15-sizes", "SD1.5, 6 steps each at 512x512, 768x512 and 512x640 px, batches of 1, 2 and 3")
def sizes(size: Size) -> Built:
    pipe = sd15(size)

    def call() -> list[torch.Tensor]:
        shapes = size([(512, 512), (768, 512), (512, 640)], [(64, 64), (64, 96), (96, 64)])
        return [
            drawn(pipe, size, 6, height=height, width=width, num_images_per_prompt=number)
            for number, (height, width) in enumerate(shapes, 1)
        ]

    return pipe, call


@script("sd15-controlnet", "SD1.5, 10 steps at 512 px with a ControlNet")
def controlnet(size: Size) -> Built:
    from diffusers import ControlNetModel

    pipe = sd15(size, "StableDiffusionControlNetPipeline", controlnet=None)
    with torch.device(size.device):
        net = ControlNetModel.from_unet(
            pipe.unet, conditioning_embedding_out_channels=size((16, 32, 96, 256), (4, 8, 8, 8))
        )
    for part in (net.controlnet_cond_embedding.conv_out, net.controlnet_mid_block, *net.controlnet_down_blocks):
        part.weight.data.normal_(std=0.02)  # zeros when they are made
    pipe.register_modules(controlnet=net.to(size.device, size.fp16).eval())
    edges = picture(size, size(512, 64))
    return pipe, lambda: drawn(pipe, size, image=edges)


@script("sd15-t2i-adapter", "SD1.5, 10 steps at 512 px with a T2I-adapter")
def t2i_adapter(size: Size) -> Built:
    from diffusers import T2IAdapter

    channels = size([320, 640, 1280, 1280], [16, 32])
    with torch.device(size.device):
        adapter = T2IAdapter(channels=channels, num_res_blocks=2, downscale_factor=8, adapter_type="full_adapter")
    adapter = adapter.to(size.fp16).eval()
    pipe = sd15(size, "StableDiffusionAdapterPipeline", adapter=adapter)
    sketch = picture(size, size(512, 64))
    return pipe, lambda: drawn(pipe, size, image=sketch, **pixels(size, 512))


@script("sd15-inpainting", "SD1.5 of inpainting, 10 steps at 512 px")
def inpainting(size: Size) -> Built:
    pipe = sd15(size, "StableDiffusionInpaintPipeline", unet_changes={"in_channels": 9})
    image, mask = picture(size, size(512, 64)), picture(size, size(512, 64), "L", 1)
    return pipe, lambda: drawn(pipe, size, image=image, mask_image=mask, **pixels(size, 512))


@script("sd15-img2img", "SD1.5, image to image, 8 of 10 steps at 512 px")
def img2img(size: Size) -> Built:
    pipe = sd15(size, "StableDiffusionImg2ImgPipeline")
    image = picture(size, size(512, 64))
    return pipe, lambda: drawn(pipe, size, image=image, strength=0.8)


@script("sdxl-tiled-vae", "SDXL, 4 steps at 1024 px, the decoder in tiles")
def tiled_vae(size: Size) -> Built:
    pipe = sdxl(size)
    pipe.vae.enable_tiling()
    side = size(1024, 128)
    if size.tiny:
        pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 64, 8
    else:
        pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 512, 64
    return pipe, lambda: drawn(pipe, size, 4, height=side, width=side)


@script("sd15-sliced-vae", "SD1.5, 4 images of 6 steps at 512 px, decoded one by one")
def sliced_vae(size: Size) -> Built:
    pipe = sd15(size)
    pipe.vae.enable_slicing()
    return pipe, lambda: drawn(pipe, size, 6, num_images_per_prompt=size(4, 2), **pixels(size, 512))
