"""Tiny UNets, VAEs and an SDXL pipeline, random; a new family of UNets is a line in the table."""

from pathlib import Path

import torch

SD = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 12,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
# What tells the families apart, in miniature: a new one is a line here.
UNETS = {
    "sd15": {},
    "sd21": {"use_linear_projection": True, "attention_head_dim": [2, 4], "upcast_attention": True},
    "sdxl": {
        "use_linear_projection": True,
        "attention_head_dim": [2, 4],
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 34,
    },
    "scale-shift": {"resnet_time_scale_shift": "scale_shift"},
    "only-cross": {"only_cross_attention": True},
    "inpainting": {"in_channels": 9},
    "scaled": {"mid_block_scale_factor": 2.0},
    "resample-in-resnet": {
        "down_block_types": ("ResnetDownsampleBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    },
}


def make_unet(family: str = "sd15", **changes):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(1)
    model = UNet2DConditionModel(**(SD | UNETS[family] | changes)).eval()
    for parameter in model.parameters():  # weights of ones and biases of zero would hide mistakes
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def make_vae(**changes):
    from diffusers import AutoencoderKL

    torch.manual_seed(2)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "sample_size": 16}
    model = AutoencoderKL(**(sizes | blocks | changes)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def unet_inputs(model, batch: int = 2, height: int = 8, width: int = 8, length: int = 7, seed: int = 0) -> dict:
    """Inputs of a tiny UNet; sizes need not be square, nor what the configuration says."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g)

    inputs = {
        "sample": rand(batch, model.config.in_channels, height, width),
        "timestep": torch.tensor(17),
        "encoder_hidden_states": rand(batch, length, model.config.cross_attention_dim),
    }
    if model.config.addition_embed_type == "text_time":
        inputs["added_cond_kwargs"] = {"text_embeds": rand(batch, 10), "time_ids": rand(batch, 6)}
    return inputs


def make_sdxl_pipeline():
    """Tiny and random, built as SDXL is: two text encoders, conditions on sizes, a VAE that may not run in half.

    It predicts v, so that what its UNet says shows in the image: a random one's noise would drown in the latents'.
    """
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    tokenizer = Path(__file__).parents[3] / "examples" / "models" / "tiny-sd-digits" / "tokenizer"
    sizes = {"vocab_size": 601, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"bos_token_id": 599, "eos_token_id": 600, "pad_token_id": 600}
    small, large = (CLIPTextConfig(hidden_size=n, projection_dim=10, **sizes, **tokens) for n in (12, 20))
    torch.manual_seed(3)
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        sample_size=64,
        force_upcast=True,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=vae.eval(),
        text_encoder=CLIPTextModel(small).eval(),
        text_encoder_2=CLIPTextModelWithProjection(large).eval(),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizer),
        tokenizer_2=CLIPTokenizer.from_pretrained(tokenizer),
        unet=make_unet("sdxl", cross_attention_dim=32),
        scheduler=EulerDiscreteScheduler(
            beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type="v_prediction"
        ),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
