"""Tiny transformers over latents, random, one of each make; a new one is a line in the table."""

from typing import Any

import torch

DITS: dict[str, tuple[str, dict[str, Any]]] = {
    "pixart": (
        "PixArtTransformer2DModel",
        {"cross_attention_dim": 16, "caption_channels": 24, "out_channels": 8, "use_additional_conditions": False},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "joint_attention_dim": 24,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 16,
        },
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "joint_attention_dim": 24,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 6, 6),
        },
    ),
}
LATENTS: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
}


def transformer(name: str, **more: Any) -> Any:
    """more: fields of its configuration."""
    import diffusers

    kind, own = DITS[name][0], DITS[name][1] | more
    config = own | {"num_attention_heads": 2} if name == "flux" else LATENTS | own
    torch.manual_seed(1)
    model = getattr(diffusers, kind)(**config).eval()
    for parameter in model.parameters():  # modulations that begin as zeros would hide mistakes
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def given(name: str, seed: int = 0, times: int = 1) -> dict[str, Any]:
    """Inputs of a transformer of this name, of so many times 12 tokens to an image."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    inputs = {"encoder_hidden_states": rand(2, 5, 24), "timestep": torch.tensor([17.0, 400.0])}
    if name == "pixart":
        return inputs | {
            "hidden_states": rand(2, 4, 8 * times, 6),
            "added_cond_kwargs": dict.fromkeys(("resolution", "aspect_ratio")),
        }
    inputs["pooled_projections"] = rand(2, 16)
    if name == "sd3":
        return inputs | {"hidden_states": rand(2, 4, 8 * times, 6)}
    inputs["timestep"] /= 1000  # this one counts from 0 to 1
    image = {"hidden_states": rand(2, 12 * times, 16), "img_ids": torch.zeros(12 * times, 3)}
    return inputs | image | {"txt_ids": torch.zeros(5, 3)}
