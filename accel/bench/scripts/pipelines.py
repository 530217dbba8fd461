"""Pipelines of diffusers with random weights, at published sizes or tiny: what scripts of images begin with."""

from typing import Any

import torch
from torch import nn

from accel.bench.diffusion import configs
from accel.bench.diffusion.configs import whole_config
from accel.bench.scripts.script import Size
from accel.bench.weights import SEED, random_model, random_transformer

PROMPT = "a photograph of an astronaut riding a horse"
TINY_VAE = dict(configs.SD_VAE, block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4)
TINY = dict(configs.TINY_UNET, block_out_channels=(16, 32), norm_num_groups=4, attention_head_dim=2)
TINY_XL = configs.SDXL_UNET | TINY | dict(cross_attention_dim=64, attention_head_dim=(2, 4), addition_time_embed_dim=4)
TINY_XL |= dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), transformer_layers_per_block=(1, 2))
TINY_XL |= dict(up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), projection_class_embeddings_input_dim=56)
TINY_FLUX = configs.FLUX_DEV | dict(num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2)
TINY_FLUX |= dict(joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8))


def tokenizer() -> Any:
    """A tokenizer of CLIP's kind that knows letters alone: what is written in a prompt counts for nothing here."""
    from transformers import CLIPTokenizer

    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({word: number for number, word in enumerate(words)}, [], model_max_length=77)


def clip_text(size: Size, large: bool = False) -> nn.Module:
    """A text encoder of SD1.5, or with `large` the second one of SDXL."""
    from transformers import CLIPTextConfig

    given: dict = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
    if large:
        given = dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20)
        given |= dict(projection_dim=1280, hidden_act="gelu")
    tiny = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    tiny |= dict(projection_dim=32, vocab_size=200, bos_token_id=188, eos_token_id=189, pad_token_id=189)
    kind = "CLIPTextModelWithProjection" if large else "CLIPTextModel"
    return random_transformer(kind, CLIPTextConfig(**size(given, tiny)), size.device, size.fp16)


def vae(size: Size, **changes: Any) -> nn.Module:
    """The autoencoder of Stable Diffusion."""
    return random_model("AutoencoderKL", size(configs.SD_VAE, TINY_VAE) | changes, size.device, size.fp16)


def unet(size: Size, large: bool = False, **changes: Any) -> nn.Module:
    """The UNet of SD1.5, or with `large` of SDXL."""
    config = size(configs.SDXL_UNET, TINY_XL) if large else size(configs.SD15_UNET, TINY)
    return random_model("UNet2DConditionModel", config | changes, size.device, size.fp16)


def scheduler(kind: str = "DDIMScheduler", **changes: Any) -> Any:
    """A scheduler with the noise schedule of Stable Diffusion."""
    import diffusers

    return getattr(diffusers, kind)(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", **changes)


def sd15(size: Size, kind: str = "StableDiffusionPipeline", unet_changes: dict | None = None, **parts: Any) -> Any:
    """Stable Diffusion 1.5 as a pipeline of this class. parts: what else that has."""
    import diffusers

    given = dict(vae=vae(size), text_encoder=clip_text(size), tokenizer=tokenizer())
    given |= dict(
        unet=unet(size, **(unet_changes or {})),
        scheduler=scheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
    )
    given |= dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    return _quiet(getattr(diffusers, kind)(**given | parts))


def sdxl(size: Size, force_upcast: bool = False) -> Any:
    """SDXL. force_upcast: whether its decoder runs in float32; of fp16-fix it need not."""
    import diffusers

    given = dict(vae=vae(size, force_upcast=force_upcast, sample_size=size(1024, 64)), text_encoder=clip_text(size))
    given |= dict(text_encoder_2=clip_text(size, large=True), tokenizer=tokenizer(), tokenizer_2=tokenizer())
    given |= dict(unet=unet(size, large=True), scheduler=scheduler("EulerDiscreteScheduler"))
    return _quiet(diffusers.StableDiffusionXLPipeline(**given))


def flux(size: Size, transformer: nn.Module | None = None) -> Any:
    """Flux.1-dev without text encoders: a call is given the prompt's embeddings, of `flux_prompt`."""
    import diffusers

    if transformer is None:
        transformer = flux_transformer(size)
    shifts = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return _quiet(diffusers.FluxPipeline(shifts, flux_vae(size), None, None, None, None, transformer))


def flux_vae(size: Size) -> nn.Module:
    """Of Flux.1."""
    changes: dict = dict(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)
    changes |= dict(scaling_factor=0.3611, shift_factor=0.1159)
    return random_model("AutoencoderKL", size(configs.SD_VAE, TINY_VAE) | changes, size.device, size.bf16)


def flux_transformer(size: Size, **changes: Any) -> nn.Module:
    """The transformer of Flux.1-dev."""
    config = size(configs.FLUX_DEV, TINY_FLUX) | changes
    return random_model("FluxTransformer2DModel", config, size.device, size.bf16)


def flux_prompt(size: Size) -> dict:
    """A prompt's embeddings, as arguments of a call of Flux."""
    config = whole_config("FluxTransformer2DModel", size(configs.FLUX_DEV, TINY_FLUX))
    tokens = size(512, 8)
    pixels = size(1024, 64)
    return {
        "prompt_embeds": size.randn(1, tokens, config["joint_attention_dim"], dtype=size.bf16),
        "pooled_prompt_embeds": size.randn(1, config["pooled_projection_dim"], dtype=size.bf16),
        "height": pixels,
        "width": pixels,
    }


def picture(size: Size, pixels: int, mode: str = "RGB", seed: int = SEED) -> Any:
    """A random image of PIL, with areas of a color."""
    from PIL import Image

    channels = {"RGB": 3, "L": 1}[mode]
    blocks = torch.randint(0, 256, (8, 8, channels), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(blocks.squeeze(-1).numpy()).resize((pixels, pixels), Image.Resampling.NEAREST)


def add_lora(model: nn.Module, name: str = "default", rank: int = 16, seed: int = SEED) -> None:
    """A LoRA on the attention of a denoiser, as diffusers leaves it after loading: beside the weights, not fused."""
    from peft import LoraConfig

    torch.manual_seed(seed)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights="gaussian")
    model.add_adapter(config, adapter_name=name)  # type: ignore[operator]
    for path, weight in model.named_parameters():
        if f"lora_B.{name}." in path:  # zeros when they are made
            weight.data.normal_(std=0.02)
    model.requires_grad_(False)


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe
