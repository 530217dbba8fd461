"""The cases of `accel bench` by name.

Text of as many tokens as the pipeline pads to, or of a usual length where it does not pad. Latents are an eighth of the
pixels a side, with LTX a thirty-second.
"""

import torch

from accel.bench.diffusion import configs, inputs
from accel.bench.diffusion.case import Case
from accel.bench.diffusion.inputs import Calls, Sizes

# The class, what makes its inputs, and what is changed of its default configuration.
Kind = tuple[str, Calls, dict]
SD15 = ("UNet2DConditionModel", inputs.unet_calls, configs.SD15_UNET)
SD21, SDXL, TINY = ((*SD15[:2], config) for config in (configs.SD21_UNET, configs.SDXL_UNET, configs.TINY_UNET))
VAE = ("AutoencoderKL", inputs.latents, configs.SD_VAE)
FLUX = ("FluxTransformer2DModel", inputs.flux_inputs, configs.FLUX_DEV)
FLUX2: Kind = ("Flux2Transformer2DModel", inputs.flux2_inputs, {})
SD3 = ("SD3Transformer2DModel", inputs.sd3_inputs, configs.SD3_MEDIUM)
Z_IMAGE = ("ZImageTransformer2DModel", inputs.z_image_inputs, configs.Z_IMAGE_TURBO)
QWEN: Kind = ("QwenImageTransformer2DModel", inputs.qwen_image_inputs, {})
MASKED_QWEN: Kind = (QWEN[0], inputs.masked_qwen_image_inputs, {})
WAN = ("WanTransformer3DModel", inputs.wan_inputs, configs.WAN_1_3B)
WAN_14B: Kind = (*WAN[:2], {})
LTX: Kind = ("LTXVideoTransformer3DModel", inputs.ltx_inputs, {})
PIXART = ("PixArtTransformer2DModel", inputs.pixart_inputs, configs.PIXART_SIGMA)
HUNYUAN: Kind = ("HunyuanVideoTransformer3DModel", inputs.hunyuan_video_inputs, {})
WAN_VAE: Kind = ("AutoencoderKLWan", inputs.latents, {})
LTX_VAE: Kind = ("AutoencoderKLLTXVideo", inputs.latents, {})
HUNYUAN_VAE: Kind = ("AutoencoderKLHunyuanVideo", inputs.latents, {})

# A UNet of Stable Diffusion or its decoder runs in float16, with the weights that its class begins with.
SD: dict = dict(dtype=torch.float16, compiled="whole", drawn=False, unnamed="cuda")
SD_VAE: dict = SD | dict(entry="decode")
SDXL_VAE: dict = SD_VAE | dict(dtype=torch.float32)
VIDEO_VAE: dict = dict(entry="decode", compiled=None)

# What takes seconds a call has two inputs.
QWEN_SIZES, WAN_SIZES = Sizes(2, 128, 128, 128, steps=2), Sizes(1, 60, 104, 512, frames=21, steps=2)
HUNYUAN_SIZES = Sizes(1, 40, 64, 256, frames=16, steps=2)
HUNYUAN_FRAMES = Sizes(1, 40, 64, frames=9, steps=2)
LTX_SIZES, LTX_FRAMES = Sizes(2, 15, 22, 128, frames=21), Sizes(1, 15, 22, frames=21, steps=2)
ALL = (
    Case("sd15", "SD1.5 UNet, 512 px, batch 2", *SD15, Sizes(2, 64, 64, 77), **SD),
    Case("sd15-b16", "SD1.5 UNet, 512 px, batch 16", *SD15, Sizes(16, 64, 64, 77), **SD),
    Case("sd21", "SD2.1 UNet, 768 px, batch 2", *SD21, Sizes(2, 96, 96, 77), **SD),
    Case("sdxl", "SDXL UNet, 1024 px, batch 2", *SDXL, Sizes(2, 128, 128, 77), **SD),
    Case("vae512", "SD VAE decode, 512 px", *VAE, Sizes(1, 64, 64), **SD_VAE),
    Case("vae1024", "SD VAE decode, 1024 px", *VAE, Sizes(1, 128, 128), **SD_VAE),
    Case("vae-sdxl", "SDXL VAE decode, 1024 px, float32", *VAE, Sizes(1, 128, 128), **SDXL_VAE),
    Case("flux", "Flux.1-dev, 1024 px, batch 1, 512 tokens", *FLUX, Sizes(1, 128, 128, 512)),
    Case("flux512", "Flux.1-dev, 512 px, batch 1, 512 tokens", *FLUX, Sizes(1, 64, 64, 512)),
    Case("flux2", "Flux.2-dev, 1024 px, batch 1, 512 tokens", *FLUX2, Sizes(1, 128, 128, 512, steps=2)),
    Case("sd3", "SD3-medium, 1024 px, batch 2, 333 tokens", *SD3, Sizes(2, 128, 128, 77 + 256)),
    Case("zimage", "Z-Image-Turbo, 1024 px, batch 1, 100 tokens", *Z_IMAGE, Sizes(1, 128, 128, 100)),
    Case("qwen-image", "Qwen-Image, 1024 px, batch 2 of one prompt, 128 tokens", *QWEN, QWEN_SIZES),
    Case("qwen-image-masked", "Qwen-Image, 1024 px, batch 2, 128 tokens, one row padded", *MASKED_QWEN, QWEN_SIZES),
    Case("wan", "Wan2.1-T2V-1.3B, 832x480, 81 frames, batch 1, 512 tokens", *WAN, WAN_SIZES),
    Case("wan-14b", "Wan2.1-T2V-14B, 832x480, 81 frames, batch 1, 512 tokens", *WAN_14B, WAN_SIZES),
    Case("ltx", "LTX-Video 0.9, 704x480, 161 frames, batch 2, 128 tokens", *LTX, LTX_SIZES),
    Case("pixart", "PixArt-Sigma, 1024 px, batch 2, 300 tokens", *PIXART, Sizes(2, 128, 128, 300)),
    Case("hunyuan-video", "HunyuanVideo, 512x320, 61 frames, batch 1, 256 tokens", *HUNYUAN, HUNYUAN_SIZES),
    Case("vae-wan", "Wan2.1 VAE decode, 832x480, 33 frames", *WAN_VAE, Sizes(1, 60, 104, 0, 9, 2), **VIDEO_VAE),
    Case("vae-ltx", "LTX-Video 0.9 VAE decode, 704x480, 161 frames", *LTX_VAE, LTX_FRAMES, **VIDEO_VAE),
    Case("vae-hunyuan", "HunyuanVideo VAE decode, 512x320, 33 frames", *HUNYUAN_VAE, HUNYUAN_FRAMES, **VIDEO_VAE),
    Case("tiny", "a small UNet, for a smoke run", *TINY, Sizes(2, 16, 16, 8), **SD | {"unnamed": "cpu"}),
)
CASES = {case.name: case for case in ALL}


def select(names: list[str], device: torch.device) -> list[Case]:
    """The cases of these names; without names the UNets and their decoder on a GPU, the tiny one elsewhere.

    Raises KeyError with the unknown names.
    """
    if not names:
        kind = "cuda" if device.type == "cuda" else "cpu"
        return [case for case in ALL if case.unnamed == kind]
    if unknown := [name for name in names if name not in CASES]:
        raise KeyError(*unknown)
    return [CASES[name] for name in dict.fromkeys(names)]
