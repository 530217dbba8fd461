"""What is measured: a registry of named cases."""

from collections.abc import Callable

import torch
from torch import nn

from accel.bench import configs
from accel.bench.case import SEED, STEPS, Case
from accel.bench.dit.published import PUBLISHED
from accel.diffusion.inputs import unet_inputs


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def _builder(class_name: str, config: dict) -> Callable[[torch.device, torch.dtype], nn.Module]:
    def build(device: torch.device, dtype: torch.dtype) -> nn.Module:
        import diffusers

        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(SEED)
            module = getattr(diffusers, class_name)(**config)
        nn.Module.to(module, dtype)  # diffusers' own `to` warns of modules kept in float32, which these do not have
        return module.eval().requires_grad_(False)

    return build


def _unet(
    name: str, about: str, config: dict, batch: int, size: int, *, tokens: int = 77, unnamed: str = "cuda"
) -> Case:
    """A UNet on `size` x `size` latents."""

    def inputs(device: torch.device, dtype: torch.dtype) -> list[dict]:
        def drawn(seed: int) -> dict:
            return unet_inputs(config, device, dtype, batch=batch, size=size, tokens=tokens, seed=seed)

        first = drawn(SEED)
        timesteps = torch.linspace(999, 1, STEPS, device=device).long()
        return [first | {"sample": drawn(SEED + i)["sample"], "timestep": t} for i, t in enumerate(timesteps)]

    return Case(name, about, _builder("UNet2DConditionModel", config), inputs, unnamed=unnamed)


def _vae_decode(name: str, about: str, config: dict, batch: int, size: int, dtype: torch.dtype | None = None) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype) -> list[dict]:
        generator = _generator(device)
        shape = (batch, config["latent_channels"], size, size)
        return [{"z": torch.randn(shape, generator=generator, device=device).to(dtype)} for _ in range(STEPS)]

    return Case(name, about, _builder("AutoencoderKL", config), inputs, entry="decode", dtype=dtype)


CASES = {
    case.name: case
    for case in (
        _unet("sd15", "SD1.5 UNet, 512 px, batch 2", configs.SD15_UNET, 2, 64),
        _unet("sd15-b16", "SD1.5 UNet, 512 px, batch 16", configs.SD15_UNET, 16, 64),
        _unet("sd21", "SD2.1 UNet, 768 px, batch 2", configs.SD21_UNET, 2, 96),
        _unet("sdxl", "SDXL UNet, 1024 px, batch 2", configs.SDXL_UNET, 2, 128),
        _vae_decode("vae512", "SD VAE decode, 512 px", configs.SD_VAE, 1, 64),
        _vae_decode("vae1024", "SD VAE decode, 1024 px", configs.SD_VAE, 1, 128),
        _vae_decode("vae-sdxl", "SDXL VAE decode, 1024 px, float32", configs.SD_VAE, 1, 128, torch.float32),
        *(published.case() for published in PUBLISHED),
        _unet("tiny", "a small UNet, for a smoke run", configs.TINY_UNET, 2, 16, tokens=8, unnamed="cpu"),
    )
}


def select(names: list[str], device: torch.device) -> list[Case]:
    """The cases of these names; without names the UNets and their decoder on a GPU, the tiny one elsewhere.

    Raises KeyError with the unknown names.
    """
    if not names:
        kind = "cuda" if device.type == "cuda" else "cpu"
        return [case for case in CASES.values() if case.unnamed == kind]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise KeyError(*unknown)
    return [CASES[name] for name in dict.fromkeys(names)]
