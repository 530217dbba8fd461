"""Pipelines of diffusers around tiny random transformers, and calls of each: other sizes, batches and texts.

Prompts are given as embeddings, so there are no tokenizers and no text encoders. A new pipeline is a function.
"""

from collections.abc import Callable

import diffusers
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from support.compatibility.tiny_diffusers_models import build

WIDTH = 32  # of embeddings of a text
LAYERS = ("num_layers", "num_single_layers", "n_layers")
PIPELINES: dict[str, Callable] = {}


def pipeline(make):
    PIPELINES[make.__name__] = make
    return make


def transformer(name: str, **config):
    """Of two blocks a list, with weights that make a difference."""
    settings = {key: value for key, value in build(name).config.items() if not key.startswith("_")}
    settings |= {key: 2 for key in LAYERS if key in settings} | config
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**settings).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


def assemble(kind: str, model, vae, scheduler=None, **others):
    """The pipeline of that class; what encodes texts is left out."""
    kind = getattr(diffusers, kind)
    encoders = [name for name in kind._get_signature_keys(kind)[0] if name.startswith(("text_encoder", "tokenizer"))]
    scheduler = scheduler or FlowMatchEulerDiscreteScheduler()
    parts = dict.fromkeys(encoders) | {"transformer": model, "vae": vae, "scheduler": scheduler} | others
    made = kind(**parts)
    made.set_progress_bar_config(disable=True)
    return made


def images_vae(channels: int = 4):
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4), latent_channels=channels, norm_num_groups=1, shift_factor=0.06, scaling_factor=1.5,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def made(kind: str, **config):
    torch.manual_seed(0)
    return getattr(diffusers, kind)(**config).eval()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def call(batch: int, tokens: int, height: int, width: int, **others) -> dict:
    embeddings = {"prompt_embeds": random(batch, tokens, WIDTH)}
    return embeddings | {"height": height, "width": width, "num_inference_steps": 2} | others


def guided(one: dict, **others) -> dict:
    """With another text to go away from."""
    return one | {f"negative_{name}": -one[name] for name in one if name.endswith("prompt_embeds")} | others


def masked(one: dict, *hidden: int, name: str = "prompt_attention_mask", dtype=torch.long) -> dict:
    """With so many last tokens of each text left out."""
    tokens = one["prompt_embeds"].shape[1]
    return one | {name: torch.tensor([[1] * (tokens - last) + [0] * last for last in hidden], dtype=dtype)}


def guided_and_masked(one: dict, *hidden: int, name: str = "prompt_attention_mask", dtype=torch.long, **others) -> dict:
    both = guided(masked(one, *hidden, name=name, dtype=dtype), **others)
    return both | {f"negative_{name}": both[name]}


@pipeline
def flux():
    model = transformer("FluxTransformer2DModel", guidance_embeds=True)
    calls = [call(1, 7, 16, 16), call(2, 5, 24, 16), call(1, 7, 16, 40)]
    calls = [one | {"pooled_prompt_embeds": random(len(one["prompt_embeds"]), WIDTH)} for one in calls]
    return assemble("FluxPipeline", model, images_vae()), calls


@pipeline
def flux_guided():
    whole, calls = flux()
    return whole, [guided(one, true_cfg_scale=3.0) for one in calls]


@pipeline
def flux_from_an_image():
    whole, calls = flux()
    whole = diffusers.FluxImg2ImgPipeline(**whole.components)
    given = [one | {"image": picture(one["height"], one["width"]), "num_inference_steps": 3} for one in calls]
    return whole, given


@pipeline
def flux_inpainting():
    whole, calls = flux_from_an_image()
    return diffusers.FluxInpaintPipeline(**whole.components), [one | {"mask_image": one["image"]} for one in calls]


@pipeline
def flux_controlled():
    whole, calls = flux()
    config = {key: value for key, value in whole.transformer.config.items() if not key.startswith("_")}
    del config["out_channels"]
    torch.manual_seed(3)
    net = diffusers.FluxControlNetModel(**config | {"num_layers": 1, "num_single_layers": 1}).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    parts = {
        name: part for name, part in whole.components.items() if name not in ("image_encoder", "feature_extractor")
    }
    whole = diffusers.FluxControlNetPipeline(**parts, controlnet=net)
    return whole, [one | {"control_image": picture(one["height"], one["width"])} for one in calls]


@pipeline
def flux_kontext():
    whole, calls = flux()
    given = [
        one
        | {
            "image": picture(one["height"], one["width"]),
            "max_area": one["height"] * one["width"],
            "_auto_resize": False,
        }
        for one in calls
    ]
    return diffusers.FluxKontextPipeline(**whole.components), given


@pipeline
def flux2():
    vae = made(
        "AutoencoderKLFlux2", block_out_channels=(4,), latent_channels=4, norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",), layers_per_block=1,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    calls = [call(1, 7, 16, 16), call(2, 5, 16, 32)]
    return assemble("Flux2Pipeline", transformer("Flux2Transformer2DModel"), vae, scheduler), calls


@pipeline
def sd3():
    config = {"in_channels": 4, "out_channels": 4, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
    calls = [call(1, 7, 16, 16), call(2, 5, 24, 16), call(1, 7, 16, 32, guidance_scale=1.0)]
    calls = [guided(one | {"pooled_prompt_embeds": random(len(one["prompt_embeds"]), WIDTH)}) for one in calls]
    return assemble("StableDiffusion3Pipeline", transformer("SD3Transformer2DModel", **config), images_vae()), calls


@pipeline
def sd3_skipping_a_layer():
    whole, calls = sd3()
    return whole, [one | {"skip_guidance_layers": [1], "num_inference_steps": 8} for one in calls[:1]]


@pipeline
def chroma():
    calls = [call(1, 7, 16, 16), call(2, 5, 24, 16), call(1, 7, 16, 16)]
    hidden = ((2,), (0, 1), (4,))
    calls = [guided_and_masked(one, *last, dtype=torch.bool) for one, last in zip(calls, hidden, strict=True)]
    return assemble("ChromaPipeline", transformer("ChromaTransformer2DModel"), images_vae()), calls


@pipeline
def auraflow():
    calls = [guided_and_masked(call(1, 7, 16, 16, prompt=None), 0), guided_and_masked(call(2, 5, 16, 32), 0, 0)]
    return assemble("AuraFlowPipeline", transformer("AuraFlowTransformer2DModel"), images_vae()), calls


@pipeline
def pixart():
    model = transformer("PixArtTransformer2DModel", num_embeds_ada_norm=1000, caption_channels=WIDTH)
    others = {"use_resolution_binning": False, "negative_prompt": None}
    calls = [guided_and_masked(call(1, 7, 16, 16, **others), 2), guided_and_masked(call(2, 5, 16, 32, **others), 0, 3)]
    return assemble("PixArtSigmaPipeline", model, images_vae(), diffusers.DPMSolverMultistepScheduler()), calls


@pipeline
def sana():
    vae = made(
        "AutoencoderDC", in_channels=3, latent_channels=4, attention_head_dim=2, scaling_factor=0.4,
        encoder_block_types=("ResBlock", "EfficientViTBlock"), decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
    )  # fmt: skip
    model = transformer("SanaTransformer2DModel", in_channels=4, out_channels=4)
    others = {"use_resolution_binning": False, "negative_prompt": None}
    calls = [guided_and_masked(call(1, 7, 32, 32, **others), 2), guided_and_masked(call(2, 5, 32, 64, **others), 0, 3)]
    return assemble("SanaPipeline", model, vae), calls


@pipeline
def lumina2():
    calls = [guided_and_masked(call(1, 7, 32, 32), 0), guided_and_masked(call(2, 5, 32, 48), 2, 0)]
    return assemble("Lumina2Pipeline", transformer("Lumina2Transformer2DModel", in_channels=4), images_vae()), calls


@pipeline
def cogview4():
    model = transformer("CogView4Transformer2DModel", in_channels=4, out_channels=4)
    return assemble("CogView4Pipeline", model, images_vae()), [guided(call(1, 7, 16, 16)), guided(call(2, 5, 16, 32))]


@pipeline
def qwen_image():
    vae = made(
        "AutoencoderKLQwenImage", base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    calls = [call(1, 7, 32, 32), call(2, 5, 32, 48), call(1, 9, 32, 32)]
    hidden = ((0,), (2, 0), (3,))
    calls = [
        guided_and_masked(one, *last, name="prompt_embeds_mask", true_cfg_scale=3.0)
        for one, last in zip(calls, hidden, strict=True)
    ]
    return assemble("QwenImagePipeline", transformer("QwenImageTransformer2DModel", out_channels=4), vae), calls


@pipeline
def z_image():
    texts = (((7,), (5,)), ((7, 9), (5, 5)), ((40,), (3,)))
    calls = [
        call(1, 1, 32, width, guidance_scale=scale)
        | {
            "prompt_embeds": [random(n, WIDTH) for n in wanted],
            "negative_prompt_embeds": [random(n, WIDTH) for n in other],
        }
        for (wanted, other), width, scale in zip(texts, (32, 48, 32), (3.0, 0.0, 3.0), strict=True)
    ]
    return assemble("ZImagePipeline", transformer("ZImageTransformer2DModel"), images_vae(16)), calls


@pipeline
def wan():
    vae = made("AutoencoderKLWan", base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    frames = (call(1, 7, 16, 16, num_frames=5), call(2, 5, 16, 32, num_frames=9), call(1, 7, 16, 16, num_frames=1))
    return assemble("WanPipeline", transformer("WanTransformer3DModel"), vae), [guided(one) for one in frames]


@pipeline
def wan_of_two_transformers():
    whole, calls = wan()
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    scheduler = diffusers.UniPCMultistepScheduler(**settings)
    others = {"transformer_2": transformer("WanTransformer3DModel", ffn_dim=32), "boundary_ratio": 0.875}
    whole = assemble("WanPipeline", whole.transformer, whole.vae, scheduler, **others)
    return whole, [one | {"guidance_scale_2": 3.0} for one in calls]


@pipeline
def ltx():
    levels, layers, four = (8, 8, 8, 8), (1, 1, 1, 1, 1), (True, True, False, False)
    vae = made(
        "AutoencoderKLLTXVideo", latent_channels=8, block_out_channels=levels, decoder_block_out_channels=levels,
        layers_per_block=layers, decoder_layers_per_block=layers, spatio_temporal_scaling=four,
        decoder_spatio_temporal_scaling=four, decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4, patch_size=1,
    )  # fmt: skip
    calls = [call(1, 7, 32, 32, num_frames=9), call(2, 5, 32, 64, num_frames=17)]
    model = transformer("LTXVideoTransformer3DModel", in_channels=8, out_channels=8)
    whole = assemble("LTXPipeline", model, vae)
    return whole, [guided_and_masked(calls[0], 2), guided_and_masked(calls[1], 0, 3)]


@pipeline
def hunyuan_video():
    vae = made(
        "AutoencoderKLHunyuanVideo", latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
        norm_num_groups=4,
    )  # fmt: skip
    model = transformer("HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4)
    calls = [call(1, 7, 16, 16, num_frames=9), call(1, 5, 16, 32, num_frames=5), call(1, 7, 16, 16, num_frames=9)]
    calls = [
        masked(one, last) | {"pooled_prompt_embeds": random(1, WIDTH)}
        for one, last in zip(calls, (2, 0, 4), strict=True)
    ]
    return assemble("HunyuanVideoPipeline", model, vae), calls


@pipeline
def cogvideox():
    vae = made(
        "AutoencoderKLCogVideoX", block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1,
        norm_num_groups=2,
    )  # fmt: skip
    config = {"in_channels": 4, "out_channels": 4, "sample_width": 2, "sample_height": 2}
    model = transformer("CogVideoXTransformer3DModel", **config, use_rotary_positional_embeddings=True)
    calls = [guided(call(batch, 7, 16, 16, num_frames=8)) for batch in (1, 2)]
    return assemble("CogVideoXPipeline", model, vae, diffusers.CogVideoXDDIMScheduler()), calls
