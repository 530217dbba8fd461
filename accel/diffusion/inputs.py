"""Example inputs for models and pipelines, from their configuration and signature: for verify and benchmarks."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from accel.patching.structure import placement

PROMPT, STEPS = "a photograph of an astronaut riding a horse", 4
TOKENS = 77


def unet_inputs(
    config: Mapping,
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    size: int | None = None,
    tokens: int = TOKENS,
    seed: int = 0,
) -> dict:
    """Keyword inputs of a UNet2DConditionModel: latents, timestep, prompt embeddings and SDXL's conditions.

    config: the model's, or the keyword arguments it is made of. size: height and width of the latents; the
    configuration's sample size by default. The values are the same on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    size = size or config["sample_size"] or 64
    width = config["cross_attention_dim"]
    inputs: dict[str, Any] = {
        "sample": rand(batch, config.get("in_channels", 4), size, size),
        "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": rand(batch, tokens, width if isinstance(width, int) else width[0]),
    }
    if config.get("addition_embed_type") == "text_time":
        pixels = 8.0 * size
        ids = torch.tensor([[pixels, pixels, 0.0, 0.0, pixels, pixels]], device=device, dtype=dtype)
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        inputs["added_cond_kwargs"] = {"text_embeds": rand(batch, pooled), "time_ids": ids.repeat(batch, 1)}
    return inputs


def denoiser_inputs(model: Any, batch: int | None = None, size: int | None = None) -> dict:
    """Keyword inputs for a UNet, a VAE or a text model, on its device and in its dtype.

    size: height and width of a VAE's image or a UNet's latents; the configuration's sample size by default.
    Raises TypeError for a model whose inputs are not known.
    """
    config = getattr(model, "config", {})
    device, dtype = placement(model)
    generator = torch.Generator("cpu").manual_seed(0)
    if "cross_attention_dim" in config and "sample_size" in config:
        return unet_inputs(config, device, dtype, batch=batch or 2, size=size)
    if hasattr(model, "decode") and "latent_channels" in config and "sample_size" in config:
        size = size or config["sample_size"]
        image = (batch or 1, config["in_channels"], size, size)
        return {"sample": (2 * torch.rand(image, generator=generator, device="cpu") - 1).to(device, dtype)}
    if hasattr(config, "vocab_size"):
        shape = (batch or 2, min(TOKENS, getattr(config, "max_position_embeddings", TOKENS)))
        return {"input_ids": torch.randint(config.vocab_size, shape, generator=generator, device="cpu").to(device)}
    raise TypeError(f"no example inputs are known for a {type(model).__name__}; give its inputs")


def example_call(pipe: Any) -> dict:
    """Arguments with which a pipeline draws from a text, or nothing, in a few steps. Raises ValueError for others."""
    known = inspect.signature(type(pipe).__call__).parameters if callable(pipe) else {}
    asks = [name for name in known if name.rpartition("_")[2] in ("image", "images", "video", "audio")]
    asks = [name for name in asks if not name.startswith("ip_adapter")]
    if asks or "num_inference_steps" not in known:
        takes = f"it takes {', '.join(asks)}" if asks else "it takes no num_inference_steps"
        raise ValueError(f"no example call is known for a {type(pipe).__name__} ({takes}); give what you call it with")
    call = {"prompt": PROMPT, "num_inference_steps": STEPS}
    return {name: value for name, value in call.items() if name in known}
