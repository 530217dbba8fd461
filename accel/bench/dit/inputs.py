"""Inputs of diffusion transformers and decoders, as the pipelines of diffusers give them to each denoising step.

Every function takes the configuration, the sizes and a `Draw`, and gives the keyword arguments of a few calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from accel.bench.case import SEED

# One for each call: as whole numbers, and by 1000 as fractions, they are exact in bfloat16 and float16 as well. So what
# differs from full precision is the model's rounding, and none of the timestep's.
TIMES = (1000, 500, 250, 125)
# In place of the pipelines' 3.5, for the same reason.
GUIDANCE = 4.0
SHORTER = 0.75  # of the tokens of the longest prompt, where another one of the batch is padded


@dataclass(frozen=True)
class Sizes:
    """Of latents, as the decoder takes them. tokens: of the prompt, padding included. steps: calls, at most 4."""

    batch: int
    height: int
    width: int
    frames: int = 1
    tokens: int = 0
    steps: int = len(TIMES)


class Draw:
    """Random and other tensors on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(SEED)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def full(self, rows: int, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full((rows,), value, device=self.device, dtype=dtype or self.dtype)

    def grid(self, *sizes: int) -> torch.Tensor:
        """Positions of a grid, (product of the sizes, number of sizes), int64."""
        axes = [torch.arange(size, device=self.device) for size in sizes]
        return torch.cartesian_prod(*axes).reshape(-1, len(sizes))

    def mask(self, sizes: Sizes, dtype: torch.dtype) -> torch.Tensor:
        """Which of a prompt's tokens are not padding: of the first row all but some, of the others fewer."""
        valid = [max(1, int(sizes.tokens * SHORTER / (1 + row))) for row in range(sizes.batch)]
        positions = torch.arange(sizes.tokens, device=self.device)
        return (positions < torch.tensor(valid, device=self.device)[:, None]).to(dtype)


def _calls(sizes: Sizes, kept: dict, new: Callable[[int], dict]) -> list[dict]:
    """kept: what is the same in every call. new(time): what is not."""
    return [kept | new(time) for time in TIMES[: sizes.steps]]


def _packed(config: dict, sizes: Sizes, draw: Draw) -> torch.Tensor:
    """Latents as rows, each a patch of 2 x 2."""
    return draw(sizes.batch, sizes.height // 2 * (sizes.width // 2), config["in_channels"])


def _packed_calls(config: dict, sizes: Sizes, draw: Draw, kept: dict) -> list[dict]:
    def new(time: int) -> dict:
        return {"hidden_states": _packed(config, sizes, draw), "timestep": draw.full(sizes.batch, time / 1000)}

    return _calls(sizes, kept, new)


def _frames(config: dict, sizes: Sizes, draw: Draw) -> torch.Tensor:
    return draw(sizes.batch, config["in_channels"], sizes.frames, sizes.height, sizes.width)


def _image(config: dict, sizes: Sizes, draw: Draw) -> torch.Tensor:
    return draw(sizes.batch, config["in_channels"], sizes.height, sizes.width)


def flux_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Arguments of forwards of Flux, by step."""
    positions = draw.grid(1, sizes.height // 2, sizes.width // 2)
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["joint_attention_dim"]),
        "pooled_projections": draw(sizes.batch, config["pooled_projection_dim"]),
        "img_ids": positions.to(draw.dtype),
        "txt_ids": torch.zeros(sizes.tokens, 3, device=draw.device, dtype=draw.dtype),
        "guidance": draw.full(sizes.batch, GUIDANCE, torch.float32) if config["guidance_embeds"] else None,
    }
    return _packed_calls(config, sizes, draw, kept)


def flux2_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Arguments of forwards of Flux.2, by step."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["joint_attention_dim"]),
        "img_ids": draw.grid(1, sizes.height // 2, sizes.width // 2, 1).expand(sizes.batch, -1, -1),
        "txt_ids": draw.grid(1, 1, 1, sizes.tokens).expand(sizes.batch, -1, -1),
        "guidance": draw.full(sizes.batch, GUIDANCE, torch.float32),
    }
    return _packed_calls(config, sizes, draw, kept)


def sd3_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Arguments of forwards of Stable Diffusion 3, by step."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["joint_attention_dim"]),
        "pooled_projections": draw(sizes.batch, config["pooled_projection_dim"]),
    }
    full = partial(draw.full, sizes.batch, dtype=torch.float32)
    return _calls(sizes, kept, lambda time: {"hidden_states": _image(config, sizes, draw), "timestep": full(time)})


def z_image_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Images and prompts come as lists; a time goes from 0 to 1."""
    prompts = [draw(sizes.tokens, config["cap_feat_dim"]) for _ in range(sizes.batch)]

    def image() -> torch.Tensor:
        return draw(config["in_channels"], 1, sizes.height, sizes.width)

    def new(time: int) -> dict:
        return {"x": [image() for _ in range(sizes.batch)], "t": draw.full(sizes.batch, 1 - time / 1000, torch.float32)}

    return _calls(sizes, {"cap_feats": prompts}, new)


def qwen_image_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Images of one prompt: its mask is left out, as the pipeline does where no prompt is padded."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["joint_attention_dim"]),
        "encoder_hidden_states_mask": None,
        "img_shapes": [[(1, sizes.height // 2, sizes.width // 2)]] * sizes.batch,
        "guidance": None,
    }
    return _packed_calls(config, sizes, draw, kept)


def masked_qwen_image_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Images of several prompts, the shorter ones padded."""
    mask = draw.mask(sizes, torch.int64)
    mask[0] = 1
    return [kwargs | {"encoder_hidden_states_mask": mask} for kwargs in qwen_image_inputs(config, sizes, draw)]


def wan_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """The prompt's tokens behind its end are zeros, without a mask."""
    prompt = draw(sizes.batch, sizes.tokens, config["text_dim"])
    prompt *= draw.mask(sizes, draw.dtype)[..., None]
    full, kept = partial(draw.full, sizes.batch, dtype=torch.int64), {"encoder_hidden_states": prompt}
    return _calls(sizes, kept, lambda time: {"hidden_states": _frames(config, sizes, draw), "timestep": full(time)})


def ltx_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Latents as rows; positions in seconds, at 25 frames a second, and in pixels."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["caption_channels"]),
        "encoder_attention_mask": draw.mask(sizes, torch.bool),
        "num_frames": sizes.frames,
        "height": sizes.height,
        "width": sizes.width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }
    rows, full = sizes.frames * sizes.height * sizes.width, partial(draw.full, sizes.batch, dtype=torch.float32)

    def new(time: int) -> dict:
        return {"hidden_states": draw(sizes.batch, rows, config["in_channels"]), "timestep": full(time)}

    return _calls(sizes, kept, new)


def pixart_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Arguments of forwards of PixArt, by step."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["caption_channels"]),
        "encoder_attention_mask": draw.mask(sizes, torch.int64),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    full = partial(draw.full, sizes.batch, dtype=torch.int64)  # its table of times has 1000 entries
    return _calls(sizes, kept, lambda time: {"hidden_states": _image(config, sizes, draw), "timestep": full(time - 1)})


def hunyuan_video_inputs(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """Arguments of forwards of HunyuanVideo, by step."""
    kept = {
        "encoder_hidden_states": draw(sizes.batch, sizes.tokens, config["text_embed_dim"]),
        "encoder_attention_mask": draw.mask(sizes, torch.int64),
        "pooled_projections": draw(sizes.batch, config["pooled_projection_dim"]),
        "guidance": draw.full(sizes.batch, 1000 * GUIDANCE),
    }
    full = partial(draw.full, sizes.batch, dtype=torch.float32)
    return _calls(sizes, kept, lambda time: {"hidden_states": _frames(config, sizes, draw), "timestep": full(time)})


def video_latents(config: dict, sizes: Sizes, draw: Draw) -> list[dict]:
    """What a decoder of video gets."""
    channels = config["latent_channels"] if "latent_channels" in config else config["z_dim"]
    shape = (sizes.batch, channels, sizes.frames, sizes.height, sizes.width)
    return _calls(sizes, {}, lambda time: {"z": draw(*shape)})
