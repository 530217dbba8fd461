"""Pipelines of diffusers at published sizes with random weights, and what a whole call of each is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accel.bench import configs
from accel.bench.dit import configs as dit_configs
from accel.bench.dit.weights import random_model

TOKENIZER = Path(__file__).parents[1] / "examples" / "models" / "tiny-sd-digits" / "tokenizer"
PROMPT = "a handwritten seven"
TOKENS = {"flux": 512, "zimage": 100}

# black-forest-labs/FLUX.1-dev; Tongyi-MAI/Z-Image-Turbo has the same decoder
FLUX_VAE = configs.SD_VAE | dict(
    sample_size=1024,
    latent_channels=16,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
SCHEDULERS = {
    "flux": dict(
        base_image_seq_len=256, base_shift=0.5, max_image_seq_len=4096, max_shift=1.15, shift=3.0,
        use_dynamic_shifting=True,
    ),
    "zimage": dict(shift=3.0),
}  # fmt: skip


def _text_config(**sizes):
    from transformers import CLIPTextConfig

    return CLIPTextConfig(**{"num_hidden_layers": 12, "num_attention_heads": 12} | sizes)


@torch.no_grad()
def unet_pipeline(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict]:
    """Stable Diffusion 1.5, or for `sdxl` SDXL, with its text encoders."""
    import diffusers
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    scheduler = diffusers.PNDMScheduler(  # as the published pipelines have it
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True, steps_offset=1
    )
    with torch.device(device):
        text = CLIPTextModel(_text_config(hidden_size=768, intermediate_size=3072))
        if name == "sdxl":
            large = _text_config(
                hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                projection_dim=1280, hidden_act="gelu",
            )  # fmt: skip
            pipe = diffusers.StableDiffusionXLPipeline(
                diffusers.AutoencoderKL(**configs.SD_VAE | {"sample_size": 1024, "force_upcast": True}),
                text,
                CLIPTextModelWithProjection(large),
                tokenizer,
                tokenizer,
                diffusers.UNet2DConditionModel(**configs.SDXL_UNET),
                scheduler,
            )
        else:
            vae, unet = diffusers.AutoencoderKL(**configs.SD_VAE), diffusers.UNet2DConditionModel(**configs.SD15_UNET)
            pipe = diffusers.StableDiffusionPipeline(
                vae, text, tokenizer, unet, scheduler, None, None, requires_safety_checker=False
            )
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
    return pipe.to(device, dtype), {"prompt": PROMPT}


def transformer_pipeline(
    name: str, device: torch.device, dtype: torch.dtype, model: dict, vae: dict, size: int
) -> tuple[Any, dict]:
    """Flux.1-dev or Z-Image-Turbo, without text encoders: the call is given the prompt's embeddings.

    model, vae: configurations; size: pixels a side.
    """
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULERS[name])
    decoder = random_model("AutoencoderKL", vae, device, dtype)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    given: dict = {"height": size, "width": size}
    if name == "flux":
        transformer = random_model("FluxTransformer2DModel", model, device, dtype)
        pipe = diffusers.FluxPipeline(scheduler, decoder, None, None, None, None, transformer)
        given["prompt_embeds"] = drawn(1, TOKENS[name], model["joint_attention_dim"])
        given["pooled_prompt_embeds"] = drawn(1, model["pooled_projection_dim"])
    else:
        transformer = random_model("ZImageTransformer2DModel", model, device, dtype)
        pipe = diffusers.ZImagePipeline(scheduler, decoder, None, None, transformer)
        given |= {"prompt_embeds": [drawn(TOKENS[name], model["cap_feat_dim"])], "guidance_scale": 0.0}
    return pipe, given


def flux(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict]:
    return transformer_pipeline(name, device, dtype, dit_configs.FLUX_DEV, FLUX_VAE, 1024)


def zimage(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict]:
    return transformer_pipeline(name, device, dtype, dit_configs.Z_IMAGE_TURBO, FLUX_VAE, 1024)


BUILDERS: dict[str, Callable[[str, torch.device, torch.dtype], tuple[Any, dict]]] = {
    "sd15": unet_pipeline,
    "sdxl": unet_pipeline,
    "flux": flux,
    "zimage": zimage,
}


def build(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, dict]:
    """The pipeline without its progress bar, and the keyword arguments of a call."""
    pipe, given = BUILDERS[name](name, device, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe, given
