"""Diffusion transformers and decoders of video at published sizes, by the names that `accel bench` takes.

Text of as many tokens as the pipeline pads to, or of a usual length where it does not pad. Latents are an eighth of the
pixels a side, with LTX a thirty-second.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from accel.bench.case import Case
from accel.bench.dit import configs, inputs
from accel.bench.dit.inputs import Draw, Sizes
from accel.bench.dit.weights import random_model


@dataclass(frozen=True)
class Published:
    """A model of diffusers, its configuration, and the sizes it is measured at. exact, entry: as of a Case."""

    name: str
    about: str
    class_name: str
    config: dict
    inputs: Callable[[dict, Sizes, Draw], list[dict]]
    sizes: Sizes
    exact: int = 2
    entry: str = "forward"

    def case(self) -> Case:
        def build(device: torch.device, dtype: torch.dtype) -> nn.Module:
            return random_model(self.class_name, self.config, device, dtype)

        def made(device: torch.device, dtype: torch.dtype) -> list[dict]:
            return self.inputs(self.config, self.sizes, Draw(device, dtype))

        return Case(
            self.name,
            self.about,
            build,
            made,
            entry=self.entry,
            unnamed=None,
            dtype=torch.bfloat16,
            compiled="blocks" if self.entry == "forward" else None,
            exact=self.exact,
        )


# The class, its configuration, and what makes its inputs.
FLUX = ("FluxTransformer2DModel", configs.FLUX_DEV, inputs.flux_inputs)
FLUX2 = ("Flux2Transformer2DModel", configs.FLUX2_DEV, inputs.flux2_inputs)
SD3 = ("SD3Transformer2DModel", configs.SD3_MEDIUM, inputs.sd3_inputs)
Z_IMAGE = ("ZImageTransformer2DModel", configs.Z_IMAGE_TURBO, inputs.z_image_inputs)
QWEN_IMAGE = ("QwenImageTransformer2DModel", configs.QWEN_IMAGE, inputs.qwen_image_inputs)
QWEN_IMAGE_MASKED = (*QWEN_IMAGE[:2], inputs.masked_qwen_image_inputs)
WAN = ("WanTransformer3DModel", configs.WAN_1_3B, inputs.wan_inputs)
WAN_14B = ("WanTransformer3DModel", configs.WAN_14B, inputs.wan_inputs)
LTX = ("LTXVideoTransformer3DModel", configs.LTX_VIDEO, inputs.ltx_inputs)
PIXART = ("PixArtTransformer2DModel", configs.PIXART_SIGMA, inputs.pixart_inputs)
HUNYUAN = ("HunyuanVideoTransformer3DModel", configs.HUNYUAN_VIDEO, inputs.hunyuan_video_inputs)
WAN_VAE = ("AutoencoderKLWan", configs.WAN_VAE, inputs.video_latents)
LTX_VAE = ("AutoencoderKLLTXVideo", configs.LTX_VAE, inputs.video_latents)
HUNYUAN_VAE = ("AutoencoderKLHunyuanVideo", configs.HUNYUAN_VAE, inputs.video_latents)
DECODER: dict = {"exact": 1, "entry": "decode"}

# What takes seconds a call has two inputs, and full precision of one call at most: on an H200 that takes 30 s for
# 14 billion weights and 32760 tokens, and 32 billion do not fit it in float32.
PIXELS_1024, VIDEO = (128, 128), (60, 104)
PUBLISHED = (
    Published("flux", "Flux.1-dev, 1024 px, batch 1, 512 tokens", *FLUX, Sizes(1, *PIXELS_1024, tokens=512)),
    Published("flux512", "Flux.1-dev, 512 px, batch 1, 512 tokens", *FLUX, Sizes(1, 64, 64, tokens=512)),
    Published(
        "flux2", "Flux.2-dev, 1024 px, batch 1, 512 tokens", *FLUX2, Sizes(1, *PIXELS_1024, tokens=512, steps=2),
        exact=0,
    ),
    Published("sd3", "SD3-medium, 1024 px, batch 2, 333 tokens", *SD3, Sizes(2, *PIXELS_1024, tokens=77 + 256)),
    Published("zimage", "Z-Image-Turbo, 1024 px, batch 1, 100 tokens", *Z_IMAGE, Sizes(1, *PIXELS_1024, tokens=100)),
    Published(
        "qwen-image", "Qwen-Image, 1024 px, batch 2 of one prompt, 128 tokens", *QWEN_IMAGE,
        Sizes(2, *PIXELS_1024, tokens=128, steps=2), exact=1,
    ),
    Published(
        "qwen-image-masked", "Qwen-Image, 1024 px, batch 2 of two prompts, 128 tokens, one padded", *QWEN_IMAGE_MASKED,
        Sizes(2, *PIXELS_1024, tokens=128, steps=2), exact=1,
    ),
    Published(
        "wan", "Wan2.1-T2V-1.3B, 832x480, 81 frames, batch 1, 512 tokens", *WAN,
        Sizes(1, *VIDEO, frames=21, tokens=512, steps=2), exact=1,
    ),
    Published(
        "wan-14b", "Wan2.1-T2V-14B, 832x480, 81 frames, batch 1, 512 tokens; a step is a pair of calls", *WAN_14B,
        Sizes(1, *VIDEO, frames=21, tokens=512, steps=2), exact=0,
    ),
    Published(
        "ltx", "LTX-Video 0.9, 704x480, 161 frames, batch 2, 128 tokens", *LTX, Sizes(2, 15, 22, frames=21, tokens=128)
    ),
    Published("pixart", "PixArt-Sigma, 1024 px, batch 2, 300 tokens", *PIXART, Sizes(2, *PIXELS_1024, tokens=300)),
    Published(
        "hunyuan-video", "HunyuanVideo, 512x320, 61 frames, batch 1, 256 tokens", *HUNYUAN,
        Sizes(1, 40, 64, frames=16, tokens=256, steps=2), exact=1,
    ),
    Published(
        "vae-wan", "Wan2.1 VAE decode, 832x480, 33 frames", *WAN_VAE, Sizes(1, *VIDEO, frames=9, steps=2), **DECODER
    ),
    Published(
        "vae-ltx", "LTX-Video 0.9 VAE decode, 704x480, 161 frames", *LTX_VAE, Sizes(1, 15, 22, frames=21, steps=2),
        **DECODER,
    ),
    Published(
        "vae-hunyuan", "HunyuanVideo VAE decode, 512x320, 33 frames", *HUNYUAN_VAE,
        Sizes(1, 40, 64, frames=9, steps=2), **DECODER,
    ),
)  # fmt: skip
