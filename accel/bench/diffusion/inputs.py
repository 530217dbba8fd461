"""Inputs of denoisers and decoders, as the pipelines of diffusers give them to each denoising step.

Each gives the keyword arguments of a few calls, made by a `Draw`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accel.bench.weights import SEED
from accel.diffusion import inputs

# One for each call: as whole numbers, and by 1000 as fractions, they are exact in bfloat16 and float16 as well. So what
# differs from full precision is the model's rounding, and none of the timestep's.
TIMES = (1000, 500, 250, 125)
STEPS = len(TIMES)
# In place of the pipelines' 3.5, for the same reason.
GUIDANCE = 4.0
SHORTER = 0.75  # of the tokens of the longest prompt, where another one of the batch is padded


@dataclass(frozen=True)
class Sizes:
    """Of latents, as the decoder takes them. tokens: of the prompt, padding included. steps: calls, at most STEPS."""

    batch: int
    height: int
    width: int
    tokens: int = 0
    frames: int = 1
    steps: int = STEPS


class Draw:
    """Random and other tensors on one device, for a model of this configuration at these sizes."""

    def __init__(self, config: dict, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.sizes, self.device, self.dtype = config, sizes, device, dtype
        self.generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int | str) -> torch.Tensor:
        """Random numbers; a size may be the name of one of `Sizes` or of the configuration."""
        known = self.config | vars(self.sizes)
        sizes = [known[size] if isinstance(size, str) else size for size in shape]
        return torch.randn(sizes, generator=self.generator, device=self.device).to(self.dtype)

    def full(self, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(batch,)"""
        return torch.full((self.sizes.batch,), value, device=self.device, dtype=dtype or self.dtype)

    def grid(self, *sizes: int) -> torch.Tensor:
        """Positions of a grid, (product of the sizes, number of sizes), int64."""
        axes = [torch.arange(size, device=self.device) for size in sizes]
        return torch.cartesian_prod(*axes).reshape(-1, len(sizes))

    def mask(self, dtype: torch.dtype, whole: int = 0) -> torch.Tensor:
        """Which of a prompt's tokens are not padding: of each row fewer, but for the `whole` first ones."""
        sizes = self.sizes
        valid = [max(1, int(sizes.tokens * SHORTER / (1 + row))) for row in range(sizes.batch)]
        valid[:whole] = [sizes.tokens] * whole
        positions = torch.arange(sizes.tokens, device=self.device)
        return (positions < torch.tensor(valid, device=self.device)[:, None]).to(dtype)

    @property
    def patches(self) -> tuple[int, int]:
        """Rows and columns of patches of 2 x 2."""
        return self.sizes.height // 2, self.sizes.width // 2

    def packed(self) -> torch.Tensor:
        """Latents as rows, each a patch of 2 x 2."""
        return self("batch", self.patches[0] * self.patches[1], "in_channels")


Make = Callable[[Draw], Any]
Calls = Callable[[Draw], list[dict]]


def model_inputs(
    latents: Make,
    time: Callable[[Draw, int], torch.Tensor],
    names: tuple[str, str] = ("hidden_states", "timestep"),
    **kept: Any,
) -> Calls:
    """The calls of a denoiser. latents, time: make the arguments of these names, which are new in every call.

    kept: what is the same in every call, as it is or as a function that makes it.
    """

    def calls(draw: Draw) -> list[dict]:
        same = {name: make(draw) if callable(make) else make for name, make in kept.items()}
        new = ((latents(draw), time(draw, value)) for value in TIMES[: draw.sizes.steps])
        return [same | dict(zip(names, each, strict=True)) for each in new]

    return calls


def _fraction(draw: Draw, time: int) -> torch.Tensor:
    return draw.full(time / 1000)


def _whole(draw: Draw, time: int) -> torch.Tensor:
    return draw.full(time, torch.float32)


def _of(*shape: str) -> Make:
    return lambda draw: draw(*shape)


IMAGE, FRAMES = (_of("batch", "in_channels", *more, "height", "width") for more in ((), ("frames",)))
PROMPT, CAPTION = (_of("batch", "tokens", width) for width in ("joint_attention_dim", "caption_channels"))
POOLED = _of("batch", "pooled_projection_dim")


def _guidance(draw: Draw) -> torch.Tensor | None:
    return draw.full(GUIDANCE, torch.float32) if draw.config["guidance_embeds"] else None


GUIDED: dict = dict(encoder_hidden_states=PROMPT, guidance=_guidance)

flux_inputs = model_inputs(
    Draw.packed,
    _fraction,
    **GUIDED,
    pooled_projections=POOLED,
    img_ids=lambda draw: draw.grid(1, *draw.patches).to(draw.dtype),
    txt_ids=lambda draw: torch.zeros(draw.sizes.tokens, 3, device=draw.device, dtype=draw.dtype),
)
flux2_inputs = model_inputs(
    Draw.packed,
    _fraction,
    **GUIDED,
    img_ids=lambda draw: draw.grid(1, *draw.patches, 1).expand(draw.sizes.batch, -1, -1),
    txt_ids=lambda draw: draw.grid(1, 1, 1, draw.sizes.tokens).expand(draw.sizes.batch, -1, -1),
)
sd3_inputs = model_inputs(IMAGE, _whole, encoder_hidden_states=PROMPT, pooled_projections=POOLED)
# Images and prompts come as lists; a time goes from 0 to 1.
z_image_inputs = model_inputs(
    lambda draw: [draw("in_channels", 1, "height", "width") for _ in range(draw.sizes.batch)],
    lambda draw, time: draw.full(1 - time / 1000, torch.float32),
    ("x", "t"),
    cap_feats=lambda draw: [draw("tokens", "cap_feat_dim") for _ in range(draw.sizes.batch)],
)
# The pipeline leaves out the mask where no prompt is padded.
QWEN: dict = dict(encoder_hidden_states=PROMPT, guidance=None, encoder_hidden_states_mask=None)
QWEN |= dict(img_shapes=lambda draw: [[(1, *draw.patches)]] * draw.sizes.batch)
qwen_image_inputs = model_inputs(Draw.packed, _fraction, **QWEN)
MASKED = QWEN | dict(encoder_hidden_states_mask=lambda draw: draw.mask(torch.int64, whole=1))
masked_qwen_image_inputs = model_inputs(Draw.packed, _fraction, **MASKED)
# The prompt's tokens behind its end are zeros, without a mask.
wan_inputs = model_inputs(
    FRAMES,
    lambda draw, time: draw.full(time, torch.int64),
    encoder_hidden_states=lambda draw: draw("batch", "tokens", "text_dim") * draw.mask(draw.dtype)[..., None],
)
# Latents as rows; positions in seconds, at 25 frames a second, and in pixels.
ltx_inputs = model_inputs(
    lambda draw: draw("batch", draw.sizes.frames * draw.sizes.height * draw.sizes.width, "in_channels"),
    _whole,
    encoder_hidden_states=CAPTION,
    encoder_attention_mask=lambda draw: draw.mask(torch.bool),
    num_frames=lambda draw: draw.sizes.frames,
    height=lambda draw: draw.sizes.height,
    width=lambda draw: draw.sizes.width,
    rope_interpolation_scale=(8 / 25, 32, 32),
)
pixart_inputs = model_inputs(
    IMAGE,
    lambda draw, time: draw.full(time - 1, torch.int64),  # its table of times has 1000 entries
    encoder_hidden_states=CAPTION,
    encoder_attention_mask=lambda draw: draw.mask(torch.int64),
    added_cond_kwargs={"resolution": None, "aspect_ratio": None},
)
hunyuan_video_inputs = model_inputs(
    FRAMES,
    _whole,
    encoder_hidden_states=_of("batch", "tokens", "text_embed_dim"),
    encoder_attention_mask=lambda draw: draw.mask(torch.int64),
    pooled_projections=POOLED,
    guidance=lambda draw: draw.full(1000 * GUIDANCE),
)


def unet_calls(draw: Draw) -> list[dict]:
    """Of a UNet of Stable Diffusion, with square latents."""
    sizes = draw.sizes
    given = {"batch": sizes.batch, "size": sizes.height, "tokens": sizes.tokens}
    found = [inputs.unet_inputs(draw.config, draw.device, draw.dtype, **given, seed=SEED + i) for i in range(STEPS)]
    times = torch.linspace(999, 1, STEPS, device=draw.device).long()
    return [found[0] | {"sample": one["sample"], "timestep": time} for one, time in zip(found, times, strict=True)]


def latents(draw: Draw) -> list[dict]:
    """What a decoder gets; one of video, whose configuration names no sample size, with frames."""
    channels = "latent_channels" if "latent_channels" in draw.config else "z_dim"
    frames = () if "sample_size" in draw.config else ("frames",)
    return [{"z": draw("batch", channels, *frames, "height", "width")} for _ in range(draw.sizes.steps)]
