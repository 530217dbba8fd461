"""Train tiny-dit-digits: Stable Diffusion 3.5 in miniature, a diffusion transformer that draws handwritten digits.

Every part of the real pipeline is here, only smaller: two CLIP text encoders and a T5, a transformer in which text and
image attend to each other, a VAE, a flow-matching scheduler. The VAE is that of tiny-sd-digits, and so are the words
and the data; see `train_tiny_sd_digits.py`.

Needs diffusers, transformers, scikit-learn and typer. Takes about 18 minutes on one CPU core. The same seed and
machine give the same weights.

    python examples/models/train_tiny_dit_digits.py
"""

import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.utils import make_image_grid
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from train_tiny_sd_digits import EMPTY, NAMES, PIXELS, TEMPLATES, fit, make_tokenizer, prompts, training_pages
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5Tokenizer

TINY_SD = Path(__file__).parent / "tiny-sd-digits"
LENGTH = 16  # tokens of a prompt that are not padding; the longest template has eight
T5_LENGTH = 256  # to which the pipeline pads a prompt for T5
IMAGE_LENGTH = 16  # patches


def make_t5_tokenizer() -> T5Tokenizer:
    """A real T5 tokenizer whose pieces are the words of the templates, and single letters for all else."""
    words = {word for template in TEMPLATES for word in template.split() if word != "{}"} | set(NAMES)
    letters = ["\u2581", *map(chr, range(ord("!"), ord("~") + 1))]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("\u2581" + word, -4.0) for word in sorted(words)] + [(letter, -8.0) for letter in letters]
    return T5Tokenizer(pieces, extra_ids=0, model_max_length=T5_LENGTH)


def make_t5(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    """One layer, without relative positions: so all padding is the same vector, see `OnePadForAll`."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=32,
        d_ff=2 * width,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    t5 = T5EncoderModel(config)
    for name, weight in t5.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.zeros_(weight.requires_grad_(False))
    return t5


def make_pipeline() -> StableDiffusion3Pipeline:
    tokenizer, t5_tokenizer = make_tokenizer(LENGTH), make_t5_tokenizer()
    width = 32
    clip = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "projection_dim": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": LENGTH,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vae = AutoencoderKL.from_pretrained(TINY_SD / "vae")
    vae.register_to_config(_name_or_path=TINY_SD.name)  # which is saved; not the path of a machine
    transformer = SD3Transformer2DModel(
        sample_size=PIXELS // 8,
        patch_size=2,
        in_channels=vae.config.latent_channels,
        out_channels=vae.config.latent_channels,
        num_layers=5,
        num_attention_heads=2,
        attention_head_dim=32,
        joint_attention_dim=2 * width,  # words of both CLIPs side by side, or of T5
        pooled_projection_dim=2 * width,
        caption_projection_dim=64,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),  # as in SD3.5-medium: a second attention, of the image to itself
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(CLIPTextConfig(**clip)),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(CLIPTextConfig(**clip, hidden_act="gelu")),
        tokenizer_2=tokenizer,
        text_encoder_3=make_t5(t5_tokenizer, 2 * width),
        tokenizer_3=t5_tokenizer,
    )


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """The latents of every image, of mean 0 and variance 1 by what is then stored in the VAE's config."""
    latents = torch.cat([vae.encode(batch).latent_dist.mean for batch in images.split(100)])
    vae.register_to_config(
        shift_factor=round(latents.mean().item(), 5), scaling_factor=round(1 / latents.std().item(), 5)
    )
    return (latents - vae.config.shift_factor) * vae.config.scaling_factor


class OnePadForAll(TorchFunctionMode):
    """Joint attention to the last token weighs as if it stood there as often as T5's padding does.

    Text has no positions in this transformer, so equal vectors stay equal in every layer: one of them, weighed like
    that, gives exactly what all would, in a sixth of the time.
    """

    weights = torch.zeros(1, IMAGE_LENGTH + 2 * LENGTH)
    weights[:, -1] = math.log(T5_LENGTH - LENGTH + 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[1].shape[2] == self.weights.shape[1]:
            kwargs = kwargs | {"attn_mask": self.weights}
        return func(*args, **kwargs)


def fit_transformer(pipe: StableDiffusion3Pipeline, latents: Tensor, labels: Tensor, steps: int) -> None:
    """Flow matching, transformer and text encoders together: the velocity from the clean latents to the noise."""

    def loss() -> Tensor:
        pick = torch.randint(len(latents), (64,))
        label = torch.where(torch.rand(len(pick)) < 0.12, EMPTY, labels[pick])
        words, _, pooled, _ = pipe.encode_prompt(
            prompts(random.choice(TEMPLATES)), None, None, do_classifier_free_guidance=False
        )
        words = words[:, : 2 * LENGTH]  # CLIP's, and T5's up to the first that is padding in every prompt
        clean, noise = latents[pick], torch.randn(len(pick), *latents.shape[1:])
        sigma = torch.randn(len(pick)).sigmoid()  # more of the middle, as SD3 was trained
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        with OnePadForAll():
            velocity = pipe.transformer(noisy, words[label], pooled[label], 1000 * sigma).sample
        return F.mse_loss(velocity, noise - clean)

    trained = [pipe.transformer, pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    fit("transformer", nn.ModuleList(trained), loss, steps, 2e-3)


def main(out: Path = Path(__file__).parent / "tiny-dit-digits", seed: int = 0, steps: int = 4500) -> None:
    """Train the pipeline, save it under OUT, and draw the ten digits into OUT/samples.png."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    random.seed(seed)
    torch.manual_seed(seed)
    images, labels = training_pages()

    pipe = make_pipeline()
    fit_transformer(pipe, encode(pipe.vae, images), labels, steps)

    # What diffusers loads is float32 whatever the file holds; transformers keeps the type of the file.
    pipe.transformer.half()
    pipe.vae.half()
    pipe.save_pretrained(out)
    drawn = StableDiffusion3Pipeline.from_pretrained(out)(
        [f"a handwritten {name}" for name in NAMES], num_inference_steps=20, guidance_scale=4
    ).images
    make_image_grid(drawn, rows=2, cols=5).save(out / "samples.png")
    print(f"{out}: {sum(file.stat().st_size for file in out.rglob('*') if file.is_file()) / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
