"""Train tiny-sd-digits: Stable Diffusion 1.5 in miniature, drawing handwritten digits from a prompt.

Every part of the real pipeline is here, only smaller: a CLIP tokenizer and text encoder, a UNet with cross attention, a
VAE, a DDIM scheduler. The result is a folder that `DiffusionPipeline.from_pretrained` loads like any other.

Data: the 1,797 scanned digits that scikit-learn ships (`sklearn.datasets.load_digits`), which are the test part of
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0.
Nothing is downloaded.

Needs diffusers, transformers, scikit-learn and typer. Takes ten to twelve minutes on two CPU cores. The same
seed, machine and number of threads give the same weights.

    python examples/models/train_tiny_sd_digits.py
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.utils import make_image_grid
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = [
    "a handwritten {}",
    "handwritten {}",
    "a handwritten digit {}",
    "a handwritten number {}",
    "the handwritten digit {}",
    "the digit {}",
    "the number {}",
    "digit {}",
    "number {}",
    "{}",
    "a {}",
    "a photo of a {}",
    "a photo of the digit {}",
    "a photo of a handwritten {}",
    "a picture of the number {}",
    "a drawing of a {}",
    "a scan of a handwritten {}",
    "a {} on white paper",
    "a {} in black ink",
    "please draw a {}",
    "write the number {}",
]
EMPTY = len(NAMES)  # the "label" of the empty prompt, which classifier-free guidance needs
PIXELS = 64
COPIES = 8  # variants of each scanned digit


def prompts(template: str) -> list[str]:
    """The ten prompts of one template, in words or in figures, and the empty one."""
    digits = NAMES if random.random() < 0.6 else map(str, range(10))
    return [template.format(digit) for digit in digits] + [""]


def pages(cells: Tensor, jitter: float) -> Tensor:
    """Scans (n, 8, 8) with ink 0..1 become pages (n, 3, 64, 64) in -1..1: dark ink on white, one cell of margin.

    `jitter` turns, scales and shifts each digit a little. One bicubic sampling does that and the enlarging, and a
    contrast curve gives back the sharp pen edge that the 8x8 scan has averaged away.
    """
    angle, scale, *shift = torch.empty(4, len(cells)).uniform_(-jitter, jitter)
    angle, scale, shift = 0.15 * angle, 1 + 0.05 * scale, torch.stack(shift, 1) * 0.04
    cos, sin = scale * torch.cos(angle), scale * torch.sin(angle)
    turn = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
    grid = F.affine_grid(torch.cat([turn, shift[:, :, None]], 2), [len(cells), 1, PIXELS, PIXELS], align_corners=False)
    ink = F.grid_sample(F.pad(cells[:, None], (1, 1, 1, 1)), grid, mode="bicubic", align_corners=False)
    return torch.tanh(10 * (0.45 - ink)).expand(-1, 3, -1, -1)


def training_pages() -> tuple[Tensor, Tensor]:
    """The pages to learn from, (n, 3, 64, 64), and the digit on each; 297 scans are held out."""
    # The split of tests/support/diffusion/digits.py: its reader is measured on digits that nothing was trained on.
    scans = load_digits()
    cells, _, labels, _ = train_test_split(
        scans.images / 16, scans.target, test_size=297, random_state=0, stratify=scans.target
    )
    cells, labels = torch.tensor(cells, dtype=torch.float32), torch.tensor(labels)
    return torch.cat([pages(cells, jitter=float(copy > 0)) for copy in range(COPIES)]), labels.repeat(COPIES)


def make_tokenizer(length: int = 77) -> CLIPTokenizer:
    """A real CLIP tokenizer whose merges spell the words of the templates; all else falls back to single bytes."""
    words = sorted({word for template in TEMPLATES for word in template.split() if word != "{}"} | set(NAMES))
    merges = []
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in words]
    while pairs := Counter(pair for word in spelled for pair in pairwise(word)):
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))  # byte-pair encoding: the commonest pair first
        merges.append((left, right))
        for word in spelled:
            for i in range(len(word) - 1, 0, -1):
                if word[i - 1 : i + 1] == [left, right]:
                    word[i - 1 : i + 1] = [left + right]
    symbols = sorted(ByteLevel.alphabet())
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), *map("".join, merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({token: i for i, token in enumerate(tokens)}, merges, model_max_length=length)
    for word in words:
        assert tokenizer.tokenize(word) == [word + "</w>"], (word, tokenizer.tokenize(word))
    return tokenizer


def make_pipeline() -> StableDiffusionPipeline:
    tokenizer = make_tokenizer()
    width = 32
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=PIXELS,
    )
    unet = UNet2DConditionModel(
        sample_size=PIXELS // 8,
        block_out_channels=(32, 64, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=width,
        attention_head_dim=2,  # diffusers' old name: this is the number of heads
        norm_num_groups=8,
    )
    # The noise schedule of Stable Diffusion. The UNet predicts v rather than noise: at the noisy end a prediction of
    # the noise is divided by a small number, which a small network and half precision both feel.
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def fit(name: str, model: nn.Module, loss_of: Callable[[], Tensor], steps: int, peak_rate: float) -> None:
    """Minimize `loss_of()`: AdamW, a cosine rate, and at the end the running average of the weights."""
    weights = list(model.parameters())
    average = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=peak_rate, betas=(0.9, 0.99), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    model.train()
    bar = tqdm(range(steps), desc=name)
    smooth = None
    for step in bar:
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        rate.step()
        torch._foreach_lerp_(average, [weight.detach() for weight in weights], max(0.005, 9 / (10 + step)))
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
    with torch.no_grad():
        for weight, mean in zip(weights, average, strict=True):
            weight.copy_(mean)
    model.eval().requires_grad_(False)


def fit_vae(vae: AutoencoderKL, images: Tensor, steps: int) -> None:
    def loss() -> Tensor:
        batch = images[torch.randint(len(images), (32,))]
        posterior = vae.encode(batch).latent_dist
        # The weak pull towards a unit Gaussian keeps the latents smooth and centred, easy for the UNet to draw.
        return F.mse_loss(vae.decode(posterior.sample()).sample, batch) + 2e-4 * posterior.kl().mean() / 256

    fit("vae", vae, loss, steps, 2e-3)


@torch.no_grad()
def encode(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """The latents of every image, scaled to unit variance by the factor that is stored in the VAE's config."""
    batches = tqdm(images.split(100), desc="latents")
    latents = torch.cat([vae.encode(batch).latent_dist.mean for batch in batches])
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 5))
    return latents * vae.config.scaling_factor


def fit_unet(pipe: StableDiffusionPipeline, latents: Tensor, labels: Tensor, steps: int) -> None:
    """Train UNet and text encoder together: without the encoder's gradient, its words would stay random vectors."""
    length = pipe.tokenizer.model_max_length

    def loss() -> Tensor:
        pick = torch.randint(len(latents), (64,))
        label = torch.where(torch.rand(len(pick)) < 0.12, EMPTY, labels[pick])
        tokens = pipe.tokenizer(
            prompts(random.choice(TEMPLATES)), padding="max_length", max_length=length, return_tensors="pt"
        )
        text = pipe.text_encoder(tokens.input_ids)[0][label]  # each prompt is encoded once, however often it is used
        clean, noise = latents[pick], torch.randn(len(pick), *latents.shape[1:])
        time = torch.randint(pipe.scheduler.config.num_train_timesteps, (len(pick),))
        noisy = pipe.scheduler.add_noise(clean, noise, time)
        target = pipe.scheduler.get_velocity(clean, noise, time)
        return F.mse_loss(pipe.unet(noisy, time, text).sample, target)

    fit("unet", nn.ModuleList([pipe.unet, pipe.text_encoder]), loss, steps, 2e-3)


def main(
    out: Path = Path(__file__).parent / "tiny-sd-digits", seed: int = 0, vae_steps: int = 1200, steps: int = 3000
) -> None:
    """Train the pipeline, save it under OUT, and draw the ten digits into OUT/samples.png."""
    torch.use_deterministic_algorithms(True)
    random.seed(seed)
    torch.manual_seed(seed)
    images, labels = training_pages()
    pipe = make_pipeline()
    fit_vae(pipe.vae, images, vae_steps)
    fit_unet(pipe, encode(pipe.vae, images), labels, steps)

    pipe.save_pretrained(out)
    pipe.tokenizer.backend_tokenizer.model.save(str(out / "tokenizer"))  # vocab.json, merges.txt: for older libraries
    drawn = pipe([f"a handwritten {name}" for name in NAMES], num_inference_steps=20, guidance_scale=4).images
    make_image_grid(drawn, rows=2, cols=5).save(out / "samples.png")
    print(f"{out}: {sum(file.stat().st_size for file in out.rglob('*') if file.is_file()) / 1e6:.2f} MB")


if __name__ == "__main__":
    typer.run(main)
