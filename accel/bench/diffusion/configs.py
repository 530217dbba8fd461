"""What published models of diffusers change of the defaults of their classes; the tests count their parameters."""

import inspect

SD15_UNET: dict = dict(sample_size=64, cross_attention_dim=768)
SD21_UNET = SD15_UNET | dict(sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20))
SD21_UNET |= dict(use_linear_projection=True, upcast_attention=True)
SDXL_UNET: dict = dict(
    sample_size=128,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    block_out_channels=(320, 640, 1280),
    transformer_layers_per_block=(1, 2, 10),
    cross_attention_dim=2048,
    attention_head_dim=(5, 10, 20),
    use_linear_projection=True,
    addition_embed_type="text_time",
    addition_time_embed_dim=256,
    projection_class_embeddings_input_dim=2816,
)
SD_VAE: dict = dict(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    sample_size=512,
)
# Every kind of block of SD1.5 at a size that a CPU runs in milliseconds: for smoke tests, not for figures.
TINY_UNET = dict(
    sample_size=16,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    block_out_channels=(32, 64),
    layers_per_block=1,
    cross_attention_dim=32,
    norm_num_groups=8,
)
FLUX_DEV: dict = dict(guidance_embeds=True)
SD3_MEDIUM = dict(num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192)
Z_IMAGE_TURBO: dict = dict(axes_lens=[1536, 512, 512])
WAN_1_3B = dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)
PIXART_SIGMA = dict(caption_channels=4096, interpolation_scale=2, use_additional_conditions=False)


def whole_config(class_name: str, changes: dict) -> dict:
    """The defaults of a class of diffusers, with these changes."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return {name: one.default for name, one in parameters.items() if one.default is not one.empty} | changes
