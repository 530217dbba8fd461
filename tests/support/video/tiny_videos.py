"""Tiny autoencoders over video, random; a new one is a line in the table."""

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)

WAN = dict(base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True])
LTX = dict(
    latent_channels=8,
    block_out_channels=(8, 16),
    decoder_block_out_channels=(8, 16),
    layers_per_block=(1, 1, 1),
    decoder_layers_per_block=(1, 1, 1),
    spatio_temporal_scaling=(True, False),
    decoder_spatio_temporal_scaling=(True, False),
    decoder_inject_noise=(False,) * 3,
    upsample_residual=(False, False),
    upsample_factor=(1, 1),
    patch_size=2,
)
LTX2 = LTX | dict(
    layers_per_block=(1, 1),
    decoder_layers_per_block=(1, 1),
    spatio_temporal_scaling=(True,),
    block_out_channels=(8,),
    decoder_block_out_channels=(8,),
    decoder_spatio_temporal_scaling=(True,),
    down_block_types=("LTX2VideoDownBlock3D",),
    downsample_type=("spatiotemporal",),
    decoder_inject_noise=(False, False),
    upsample_residual=(True,),
    upsample_factor=(2,),
    decoder_spatial_padding_mode="zeros",
)
HUNYUAN = dict(
    latent_channels=4,
    block_out_channels=(8, 8, 16, 16),
    layers_per_block=1,
    norm_num_groups=4,
    mid_block_add_attention=False,
)

VIDEOS = {
    "wan": lambda: AutoencoderKLWan(**WAN),
    "wan2.2": lambda: AutoencoderKLWan(
        **WAN,
        is_residual=True,
        decoder_base_dim=8,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
    ),
    "qwen": lambda: AutoencoderKLQwenImage(**WAN),
    "ltx": lambda: AutoencoderKLLTXVideo(**LTX, down_block_types=("LTXVideoDownBlock3D",) * 2),
    "ltx-causal": lambda: AutoencoderKLLTXVideo(
        **LTX | dict(decoder_causal=True), down_block_types=("LTXVideoDownBlock3D",) * 2
    ),
    "ltx2": lambda: AutoencoderKLLTX2Video(**LTX2),
    "hunyuan": lambda: AutoencoderKLHunyuanVideo(**HUNYUAN),
    "hunyuan1.5": lambda: AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16, 32), layers_per_block=1, spatial_compression_ratio=4
    ),
}


def make_video(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = VIDEOS[family]().eval()
    for parameter in model.parameters():  # what starts at one or zero would hide mistakes behind it
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def latents(model: torch.nn.Module, frames: int = 3, height: int = 3, width: int = 2, batch: int = 1) -> torch.Tensor:
    channels = model.config.get("z_dim") or model.config.latent_channels
    generator = torch.Generator().manual_seed(frames * 100 + height * 10 + width)
    return torch.randn(batch, channels, frames, height, width, generator=generator)
