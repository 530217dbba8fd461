"""The published configurations of diffusion transformers and of decoders of video, as arguments of their classes.

Each is the `config.json` of the repository that is named. Where it holds nothing but the defaults of its class, these
are written out all the same, so that another version of diffusers measures the same model.
"""

# black-forest-labs/FLUX.1-dev
FLUX_DEV = dict(
    patch_size=1, in_channels=64, num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24,
    joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
)  # fmt: skip

# black-forest-labs/FLUX.2-dev
FLUX2_DEV = dict(
    patch_size=1, in_channels=128, num_layers=8, num_single_layers=48, attention_head_dim=128, num_attention_heads=48,
    joint_attention_dim=15360, timestep_guidance_channels=256, mlp_ratio=3.0, axes_dims_rope=(32, 32, 32, 32),
    rope_theta=2000, eps=1e-6,
)  # fmt: skip

# stabilityai/stable-diffusion-3-medium-diffusers
SD3_MEDIUM = dict(
    sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=24, attention_head_dim=64,
    num_attention_heads=24, joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048,
    pos_embed_max_size=192,
)  # fmt: skip

# Tongyi-MAI/Z-Image-Turbo
Z_IMAGE_TURBO = dict(
    all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=3840, n_layers=30, n_refiner_layers=2, n_heads=30,
    n_kv_heads=30, norm_eps=1e-5, qk_norm=True, cap_feat_dim=2560, rope_theta=256.0, t_scale=1000.0,
    axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512],
)  # fmt: skip

# Qwen/Qwen-Image
QWEN_IMAGE = dict(
    patch_size=2, in_channels=64, out_channels=16, num_layers=60, attention_head_dim=128, num_attention_heads=24,
    joint_attention_dim=3584, guidance_embeds=False, axes_dims_rope=(16, 56, 56),
)  # fmt: skip

# Wan-AI/Wan2.1-T2V-14B-Diffusers
WAN_14B = dict(
    patch_size=(1, 2, 2), num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16,
    text_dim=4096, freq_dim=256, ffn_dim=13824, num_layers=40, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    eps=1e-6, rope_max_seq_len=1024,
)  # fmt: skip

# Wan-AI/Wan2.1-T2V-1.3B-Diffusers
WAN_1_3B = WAN_14B | dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)

# Lightricks/LTX-Video, the first release (0.9)
LTX_VIDEO = dict(
    in_channels=128, out_channels=128, patch_size=1, patch_size_t=1, num_attention_heads=32, attention_head_dim=64,
    cross_attention_dim=2048, num_layers=28, activation_fn="gelu-approximate", qk_norm="rms_norm_across_heads",
    norm_elementwise_affine=False, norm_eps=1e-6, caption_channels=4096, attention_bias=True, attention_out_bias=True,
)  # fmt: skip

# PixArt-alpha/PixArt-Sigma-XL-2-1024-MS
PIXART_SIGMA = dict(
    sample_size=128, patch_size=2, in_channels=4, out_channels=8, num_layers=28, attention_head_dim=72,
    num_attention_heads=16, cross_attention_dim=1152, attention_bias=True, activation_fn="gelu-approximate",
    num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
    caption_channels=4096, interpolation_scale=2, use_additional_conditions=False,
)  # fmt: skip

# hunyuanvideo-community/HunyuanVideo
HUNYUAN_VIDEO = dict(
    in_channels=16, out_channels=16, num_attention_heads=24, attention_head_dim=128, num_layers=20,
    num_single_layers=40, num_refiner_layers=2, mlp_ratio=4.0, patch_size=2, patch_size_t=1, qk_norm="rms_norm",
    guidance_embeds=True, text_embed_dim=4096, pooled_projection_dim=768, rope_theta=256.0, rope_axes_dim=(16, 56, 56),
)  # fmt: skip

# Wan-AI/Wan2.1-T2V-1.3B-Diffusers, of 14B the same
WAN_VAE = dict(
    base_dim=96, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
    temperal_downsample=[False, True, True],
)  # fmt: skip

# Lightricks/LTX-Video, the first release (0.9)
LTX_VAE = dict(
    latent_channels=128, block_out_channels=(128, 256, 512, 512), decoder_block_out_channels=(128, 256, 512, 512),
    layers_per_block=(4, 3, 3, 3, 4), decoder_layers_per_block=(4, 3, 3, 3, 4),
    spatio_temporal_scaling=(True, True, True, False), decoder_spatio_temporal_scaling=(True, True, True, False),
    decoder_inject_noise=(False, False, False, False, False), upsample_residual=(False, False, False, False),
    upsample_factor=(1, 1, 1, 1), timestep_conditioning=False, patch_size=4, patch_size_t=1, resnet_norm_eps=1e-6,
    encoder_causal=True, decoder_causal=False,
)  # fmt: skip

# hunyuanvideo-community/HunyuanVideo
HUNYUAN_VAE = dict(
    latent_channels=16, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
    up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(128, 256, 512, 512), layers_per_block=2,
    norm_num_groups=32, spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
)  # fmt: skip
