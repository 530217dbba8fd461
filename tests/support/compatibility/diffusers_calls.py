"""Inputs for any model of diffusers: arguments by their names, the first in the first form that stock takes."""

import inspect
import re
from collections.abc import Callable

import torch

from support.compatibility.diffusers_demands import MODELS, TEXT, W, ones, r

BATCH, FRAMES, SIDE, PATCHES = 2, 3, 8, 16
MAIN_CHANNELS = ("in_channels", "in_visual_dim", "io_channels", "in_dim", "latent_channels")
PIXEL_CHANNELS = ("in_channels", "input_channels", "num_channels", "audio_channels")
TIMES = {"timestep", "timesteps", "t", "timestep_ratio"}
POOLED = re.compile(r".*pooled.*|image_embeddings|proj_embedding|global_hidden_states")
TEXTS = re.compile(r".*encoder_hidden_states.*|cap_feats|text_bth|source_hidden_states")
MASKS = {"encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"}


def calls(model: torch.nn.Module) -> dict[str, Callable]:
    """The call that stock takes, and the same with the first of a batch alone. Raises TypeError where it takes none."""
    given = inputs(model)
    batch = {name: value[:1] if batched(value) else value for name, value in given.items()}
    return {"call": lambda model: model(**given), "smaller batch": lambda model: model(**batch)}


def batched(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == BATCH


def inputs(model: torch.nn.Module) -> dict:
    parameters = dict(inspect.signature(type(model).forward).parameters)
    parameters.pop("self")
    first, *others = parameters
    demanded = MODELS.get(type(model).__name__, {})
    refused = []
    for form in [demanded["main"]] if "main" in demanded else forms(model):
        made = {} if form is None else {first: r(*form)}
        made |= {name: argument(name, parameters[name], form or (BATCH, PATCHES, W), model) for name in others}
        made |= demanded.get("inputs", {})
        made = {name: value for name, value in made.items() if value is not None}
        try:
            with torch.no_grad():
                model(**made)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
            continue
        return made
    raise TypeError(f"no first argument in {len(refused)} forms is taken: {refused[0]}")


def forms(model: torch.nn.Module) -> list[tuple[int, ...]]:
    """Shapes that the first input may have, the likeliest first."""
    name, config = type(model).__name__, getattr(model, "config", {})
    if hasattr(model, "decode") or "Autoencoder" in name:
        c = channels(config, PIXEL_CHANNELS, 3)
        shapes = [(c, 32, 32), (c, 5, 32, 32), (c, 9, 32, 32), (c, 64, 64), (c, 9, 64, 64), (c, 640), (c, 4096)]
        return [(BATCH, *shape) for shape in shapes] + [(1, *shape) for shape in shapes[:2]]
    c = channels(config, MAIN_CHANNELS, 4)
    image, video, rows, sound = (c, SIDE, SIDE), (c, FRAMES, SIDE, SIDE), (PATCHES, c), (c, PATCHES)
    order = [image, video, rows, sound]
    if "3D" in name:
        order = [video, rows, image, sound]
    if "1D" in name or "Audio" in name:
        order = [sound, rows, image]
    return [(BATCH, *shape) for shape in order] + [(1, *shape) for shape in order[:2]]


def channels(config, names: tuple[str, ...], otherwise: int) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), otherwise)


def argument(name: str, parameter: inspect.Parameter, form: tuple[int, ...], model: torch.nn.Module):
    """The value of another argument, by its name; None leaves it out."""
    config, required = getattr(model, "config", {}), parameter.default is inspect.Parameter.empty
    batch, patches = form[0], form[1] if len(form) == 3 else PATCHES
    axes = next((len(value) for key, value in config.items() if "axes_dim" in key and value), 3)
    if name in TIMES or (required and re.fullmatch(r"\w*timestep\w*|sigma", name)):
        return torch.full((batch,), 0.5 if name == "timestep_ratio" else 7.0)
    if TEXTS.fullmatch(name):
        return r(batch, TEXT, W) if required or name == "encoder_hidden_states" else None
    if POOLED.fullmatch(name):
        return r(batch, W)
    if name == "controlnet_cond":
        if "conditioning_channels" not in config:  # latents, then
            return r(*form)
        return r(batch, config["conditioning_channels"], *(8 * side for side in form[2:]))
    if name == "class_labels":
        return torch.ones(batch, dtype=torch.long) if config.get("num_embeds_ada_norm") else None
    if name == "guidance":
        return torch.full((batch,), 3.0) if config.get("guidance_embeds") else None
    if name == "fps":
        return torch.full((batch,), 8) if required else None
    if name in MASKS:
        return ones(batch, TEXT)
    return {
        "img_ids": torch.arange(patches).float()[:, None].repeat(1, axes),
        "txt_ids": torch.zeros(TEXT, axes),
        "img_shapes": [[(1, 4, patches // 4)]] * batch,
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.full((batch, 2), 16.0)),
    }.get(name)
