"""The published configurations of the models that are measured, as keyword arguments of their diffusers classes."""

SD15_UNET = dict(
    sample_size=64,
    down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    block_out_channels=(320, 640, 1280, 1280), layers_per_block=2, cross_attention_dim=768, attention_head_dim=8,
)  # fmt: skip

SD21_UNET = dict(
    SD15_UNET, sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True,
    upcast_attention=True,
)  # fmt: skip

SDXL_UNET = dict(
    sample_size=128, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), block_out_channels=(320, 640, 1280),
    layers_per_block=2, transformer_layers_per_block=(1, 2, 10), cross_attention_dim=2048,
    attention_head_dim=(5, 10, 20), use_linear_projection=True, addition_embed_type="text_time",
    addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
)  # fmt: skip

SD_VAE = dict(
    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, norm_num_groups=32, sample_size=512,
)  # fmt: skip

# Every kind of block of SD1.5 at a size a CPU runs in milliseconds: for smoke tests, not for figures.
TINY_UNET = dict(
    SD15_UNET, sample_size=16, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 64), layers_per_block=1,
    cross_attention_dim=32, norm_num_groups=8,
)  # fmt: skip
