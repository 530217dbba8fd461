"""Random inputs for a model from its configuration: for verify and benchmarks."""

import torch

from accel.structure import placement


def example_inputs(model, batch: int = 2, height: int | None = None, width: int | None = None, seed: int = 0) -> dict:
    """Keyword inputs of a UNet2DConditionModel: latents, timestep, prompt embeddings and SDXL's conditions.

    height, width: of the latents; the configuration's sample size by default. Raises TypeError for another model.
    """
    config = getattr(model, "config", {})
    if "cross_attention_dim" not in config or "sample_size" not in config:
        raise TypeError(f"no example inputs are known for a {type(model).__name__}; give its inputs")
    device, dtype = placement(model)
    generator = torch.Generator("cpu").manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    size = config["sample_size"] or 64
    latents = rand(batch, config["in_channels"], height or size, width or size)
    width_of_prompt = config["cross_attention_dim"]
    if not isinstance(width_of_prompt, int):
        width_of_prompt = width_of_prompt[0]
    inputs = {
        "sample": latents,
        "timestep": torch.tensor(500, device=device),
        "encoder_hidden_states": rand(batch, 77, width_of_prompt),
    }
    if config.get("addition_embed_type") == "text_time":
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        ids = torch.tensor([[height or 8 * size, width or 8 * size, 0, 0, 8 * size, 8 * size]], device=device)
        inputs["added_cond_kwargs"] = {"text_embeds": rand(batch, pooled), "time_ids": ids.repeat(batch, 1).to(dtype)}
    return inputs
