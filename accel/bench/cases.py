"""What is measured: a registry of named cases, each a model at its real size and the inputs of a few calls.

The inputs are those of a denoising loop: every call brings new latents and a new timestep, while the prompt stays the
same tensor. So whatever may be kept from step to step is kept here too, and nothing else is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from accel.bench import configs
from accel.diffusion.inputs import unet_inputs

SEED = 0
STEPS = 4  # different inputs, used in turn


@dataclass(frozen=True)
class Case:
    """One thing to time: `call(module, kwargs)` runs method `entry` of the module and gives one tensor.

    build(device, dtype):  the module with random weights, the same for the same seed and device.
    inputs(device, dtype): the keyword arguments of STEPS calls.
    """

    name: str
    about: str
    build: Callable[[torch.device, torch.dtype], nn.Module]
    inputs: Callable[[torch.device, torch.dtype], list[dict]]
    entry: str = "forward"
    real: bool = True

    def call(self, module: nn.Module, kwargs: dict) -> torch.Tensor:
        function = module if self.entry == "forward" else getattr(module, self.entry)
        return function(**kwargs, return_dict=False)[0]


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


def _unet(name: str, about: str, config: dict, batch: int, size: int, *, tokens: int = 77, real: bool = True) -> Case:
    """A UNet on `size` x `size` latents."""

    def inputs(device: torch.device, dtype: torch.dtype) -> list[dict]:
        def drawn(seed: int) -> dict:
            return unet_inputs(config, device, dtype, batch=batch, size=size, tokens=tokens, seed=seed)

        first = drawn(SEED)
        timesteps = torch.linspace(999, 1, STEPS, device=device).long()
        return [first | {"sample": drawn(SEED + i)["sample"], "timestep": t} for i, t in enumerate(timesteps)]

    return Case(name, about, _builder("UNet2DConditionModel", config), inputs, real=real)


def _vae_decode(name: str, about: str, config: dict, batch: int, size: int) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype) -> list[dict]:
        generator = _generator(device)
        shape = (batch, config["latent_channels"], size, size)
        return [{"z": torch.randn(shape, generator=generator, device=device).to(dtype)} for _ in range(STEPS)]

    return Case(name, about, _builder("AutoencoderKL", config), inputs, entry="decode")


CASES = {
    case.name: case
    for case in (
        _unet("sd15", "SD1.5 UNet, 512 px, batch 2", configs.SD15_UNET, 2, 64),
        _unet("sd15-b16", "SD1.5 UNet, 512 px, batch 16", configs.SD15_UNET, 16, 64),
        _unet("sd21", "SD2.1 UNet, 768 px, batch 2", configs.SD21_UNET, 2, 96),
        _unet("sdxl", "SDXL UNet, 1024 px, batch 2", configs.SDXL_UNET, 2, 128),
        _vae_decode("vae512", "SD VAE decode, 512 px", configs.SD_VAE, 1, 64),
        _vae_decode("vae1024", "SD VAE decode, 1024 px", configs.SD_VAE, 1, 128),
        _unet("tiny", "a small UNet, for a smoke run", configs.TINY_UNET, 2, 16, tokens=8, real=False),
    )
}


def select(names: list[str], device: torch.device) -> list[Case]:
    """The cases of these names; without names every real one on a GPU, the tiny one elsewhere.

    Raises KeyError with the unknown names.
    """
    if not names:
        return [case for case in CASES.values() if case.real == (device.type == "cuda")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise KeyError(*unknown)
    return [CASES[name] for name in dict.fromkeys(names)]


def shapes(kwargs: dict) -> dict[str, list[int]]:
    """The shape of every tensor of a call, nested dicts flattened with a dot."""
    found = {}
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            found[key] = list(value.shape)
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": shape for inner, shape in shapes(value).items()}
    return found
