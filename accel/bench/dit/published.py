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


# What takes seconds a call has two inputs, and full precision of one call at most: on an H200 that takes 30 s for
# 14 billion weights and 32760 tokens, and 32 billion do not fit it in float32.
PUBLISHED = (
    Published(
        "flux",
        "Flux.1-dev, 1024 px, batch 1, 512 tokens",
        "FluxTransformer2DModel",
        configs.FLUX_DEV,
        inputs.flux_inputs,
        Sizes(1, 128, 128, tokens=512),
    ),
    Published(
        "flux512",
        "Flux.1-dev, 512 px, batch 1, 512 tokens",
        "FluxTransformer2DModel",
        configs.FLUX_DEV,
        inputs.flux_inputs,
        Sizes(1, 64, 64, tokens=512),
    ),
    Published(
        "flux2",
        "Flux.2-dev, 1024 px, batch 1, 512 tokens",
        "Flux2Transformer2DModel",
        configs.FLUX2_DEV,
        inputs.flux2_inputs,
        Sizes(1, 128, 128, tokens=512, steps=2),
        exact=0,
    ),
    Published(
        "sd3",
        "SD3-medium, 1024 px, batch 2, 333 tokens",
        "SD3Transformer2DModel",
        configs.SD3_MEDIUM,
        inputs.sd3_inputs,
        Sizes(2, 128, 128, tokens=77 + 256),
    ),
    Published(
        "zimage",
        "Z-Image-Turbo, 1024 px, batch 1, 100 tokens",
        "ZImageTransformer2DModel",
        configs.Z_IMAGE_TURBO,
        inputs.z_image_inputs,
        Sizes(1, 128, 128, tokens=100),
    ),
    Published(
        "qwen-image",
        "Qwen-Image, 1024 px, batch 2 of one prompt, 128 tokens",
        "QwenImageTransformer2DModel",
        configs.QWEN_IMAGE,
        inputs.qwen_image_inputs,
        Sizes(2, 128, 128, tokens=128, steps=2),
        exact=1,
    ),
    Published(
        "qwen-image-masked",
        "Qwen-Image, 1024 px, batch 2 of two prompts, 128 tokens, one padded",
        "QwenImageTransformer2DModel",
        configs.QWEN_IMAGE,
        inputs.masked_qwen_image_inputs,
        Sizes(2, 128, 128, tokens=128, steps=2),
        exact=1,
    ),
    Published(
        "wan",
        "Wan2.1-T2V-1.3B, 832x480, 81 frames, batch 1, 512 tokens",
        "WanTransformer3DModel",
        configs.WAN_1_3B,
        inputs.wan_inputs,
        Sizes(1, 60, 104, frames=21, tokens=512, steps=2),
        exact=1,
    ),
    Published(
        "wan-14b",
        "Wan2.1-T2V-14B, 832x480, 81 frames, batch 1, 512 tokens; a step is a pair of calls",
        "WanTransformer3DModel",
        configs.WAN_14B,
        inputs.wan_inputs,
        Sizes(1, 60, 104, frames=21, tokens=512, steps=2),
        exact=0,
    ),
    Published(
        "ltx",
        "LTX-Video 0.9, 704x480, 161 frames, batch 2, 128 tokens",
        "LTXVideoTransformer3DModel",
        configs.LTX_VIDEO,
        inputs.ltx_inputs,
        Sizes(2, 15, 22, frames=21, tokens=128),
    ),
    Published(
        "pixart",
        "PixArt-Sigma, 1024 px, batch 2, 300 tokens",
        "PixArtTransformer2DModel",
        configs.PIXART_SIGMA,
        inputs.pixart_inputs,
        Sizes(2, 128, 128, tokens=300),
    ),
    Published(
        "hunyuan-video",
        "HunyuanVideo, 512x320, 61 frames, batch 1, 256 tokens",
        "HunyuanVideoTransformer3DModel",
        configs.HUNYUAN_VIDEO,
        inputs.hunyuan_video_inputs,
        Sizes(1, 40, 64, frames=16, tokens=256, steps=2),
        exact=1,
    ),
    Published(
        "vae-wan",
        "Wan2.1 VAE decode, 832x480, 33 frames",
        "AutoencoderKLWan",
        configs.WAN_VAE,
        inputs.video_latents,
        Sizes(1, 60, 104, frames=9, steps=2),
        exact=1,
        entry="decode",
    ),
    Published(
        "vae-ltx",
        "LTX-Video 0.9 VAE decode, 704x480, 161 frames",
        "AutoencoderKLLTXVideo",
        configs.LTX_VAE,
        inputs.video_latents,
        Sizes(1, 15, 22, frames=21, steps=2),
        exact=1,
        entry="decode",
    ),
    Published(
        "vae-hunyuan",
        "HunyuanVideo VAE decode, 512x320, 33 frames",
        "AutoencoderKLHunyuanVideo",
        configs.HUNYUAN_VAE,
        inputs.video_latents,
        Sizes(1, 40, 64, frames=9, steps=2),
        exact=1,
        entry="decode",
    ),
)
