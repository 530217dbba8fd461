"""Adapters with random weights and fixed seeds: LoRA, IP-Adapter, textual inversion, ControlNet, T2I-Adapter.

Steps of the table in changes.py: functions of (pipe, folder) that load one as users do, from a file where
published ones are files.
"""

from collections.abc import Callable

import torch
from torch import nn

LORA_TARGETS = ("to_q", "to_v", "to_out.0", "ff.net.0.proj", "conv1", "q_proj", "fc1")
IMAGE_EMBEDDING = 6


def random(shape, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(name: str, seed: int = 0, parts=("unet", "text_encoder", "text_encoder_2"), **options) -> Callable:
    """Loads an adapter for these parts of the pipeline from a file, as published ones are."""

    def layers(model, seed):
        state = {}
        for path, module in model.named_modules():
            if not path.endswith(LORA_TARGETS):
                continue
            weight = module.weight
            state[f"{path}.lora_A.weight"] = random((4, *weight.shape[1:]), seed, weight[0].numel() ** -0.5)
            state[f"{path}.lora_B.weight"] = random((weight.shape[0], 4, *(1 for _ in weight.shape[2:])), seed + 1, 0.1)
            seed += 2
        return state

    def load(pipe, folder):
        file = folder / f"{name}-{seed}.safetensors"
        if not file.exists():
            there = [part for part in parts if hasattr(pipe, part)]
            weights = {f"{part}_lora_layers": layers(getattr(pipe, part), 100 * seed) for part in there}
            type(pipe).save_lora_weights(folder, weight_name=file.name, **weights)
        pipe.load_lora_weights(folder, weight_name=file.name, adapter_name=name, **options)

    return load


def ip_adapter(pipe, folder) -> None:
    """A random IP-Adapter of four image tokens, from a file."""
    from safetensors.torch import save_file

    file = folder / "ip-adapter.safetensors"
    if not file.exists():
        width = pipe.unet.config.cross_attention_dim
        state = {
            "image_proj.proj.weight": random((4 * width, IMAGE_EMBEDDING), 1, 0.3),
            "image_proj.proj.bias": random((4 * width,), 2),
            "image_proj.norm.weight": torch.ones(width),
            "image_proj.norm.bias": torch.zeros(width),
        }
        attentions = [module for name, module in pipe.unet.named_modules() if name.endswith("attn2")]
        for number, attention in enumerate(attentions):  # published files count self-attentions too
            for part in ("to_k_ip", "to_v_ip"):
                shape = (attention.inner_dim, width)
                state[f"ip_adapter.{2 * number + 1}.{part}.weight"] = random(shape, 10 + number, 0.3)
        save_file(state, file)
    pipe.load_ip_adapter(folder, subfolder="", weight_name=file.name, image_encoder_folder=None)


def image_embeddings(pipe) -> dict:
    unconditional_and_conditional = random((2, 1, IMAGE_EMBEDDING), 7).to(pipe.device, pipe.dtype)
    return {"ip_adapter_image_embeds": [unconditional_and_conditional]}


def readers(pipe) -> list[dict]:
    """Text encoders and their tokenizers, as keyword arguments."""
    suffixes = [suffix for suffix in ("", "_2") if hasattr(pipe, f"text_encoder{suffix}")]
    return [{name: getattr(pipe, name + suffix) for name in ("text_encoder", "tokenizer")} for suffix in suffixes]


def textual_inversion(pipe, folder) -> None:
    """A token of two vectors for each text encoder of the pipeline."""
    for reader in readers(pipe):
        vectors = random((2, reader["text_encoder"].config.hidden_size), 3)
        pipe.load_textual_inversion(vectors, token="<style>", **reader)


def forget_tokens(pipe) -> None:
    for reader in readers(pipe):
        pipe.unload_textual_inversion("<style>", **reader)


def derived(kind: str, **parts: Callable) -> Callable:
    """Another pipeline of diffusers around the same models, with the new parts it needs."""

    def build(pipe, folder):
        import diffusers

        new = {part: make(pipe).to(pipe.device, pipe.dtype) for part, make in parts.items()}
        name = type(pipe).__name__.replace("Pipeline", f"{kind}Pipeline")
        other = getattr(diffusers, name).from_pipe(pipe, **new)
        other.set_progress_bar_config(disable=True)
        return other

    return build


def controlnet(pipe) -> nn.Module:
    """Random, so that its zero convolutions steer."""
    from diffusers import ControlNetModel

    torch.manual_seed(4)
    model = ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8,) * levels(pipe)).eval()
    for parameter in model.parameters():
        parameter.data += random(parameter.shape, 5, 0.05).to(parameter)
    return model


def t2i_adapter(pipe) -> nn.Module:
    from diffusers import T2IAdapter

    torch.manual_seed(5)
    kind, factor = ("full_adapter_xl", 2) if hasattr(pipe, "text_encoder_2") else ("full_adapter", 1)
    widths = list(pipe.unet.config.block_out_channels)
    return T2IAdapter(3, widths, 1, downscale_factor=factor * pipe.vae_scale_factor, adapter_type=kind).eval()


def levels(pipe) -> int:
    """Convolutions by which a control image of 64 pixels comes down to the size of the latents, plus one."""
    return pipe.vae_scale_factor.bit_length()


def page() -> torch.Tensor:
    return random((1, 3, 64, 64), 6).sigmoid()


def left_half() -> torch.Tensor:
    return (torch.arange(64) < 32).float().expand(1, 1, 64, 64)
