"""Random inputs for a UNet from its configuration: for verify and benchmarks."""

from collections.abc import Mapping

import torch

from accel.structure import placement


def unet_inputs(
    config: Mapping,
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    size: int | None = None,
    tokens: int = 77,
    seed: int = 0,
) -> dict:
    """Keyword inputs of a UNet2DConditionModel: latents, timestep, prompt embeddings and SDXL's conditions.

    config: the model's, or the keyword arguments it is made of. size: height and width of the latents; the
    configuration's sample size by default. The values are the same on every device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    size = size or config["sample_size"] or 64
    width = config["cross_attention_dim"]
    inputs = {
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


def example_inputs(model) -> dict:
    """Inputs for a model, on its device and in its dtype. Raises TypeError for one whose inputs are not known."""
    config = getattr(model, "config", {})
    if "cross_attention_dim" not in config or "sample_size" not in config:
        raise TypeError(f"no example inputs are known for a {type(model).__name__}; give its inputs")
    return unet_inputs(config, *placement(model))
