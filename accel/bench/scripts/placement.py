"""Scripts of diffusers that save memory: offloading of every kind, weights in 8 bits, GGUF; and Flux."""

from collections.abc import Callable
from typing import Any

import torch

from accel.bench.adapters import linears_of_blocks
from accel.bench.formats import FORMATS
from accel.bench.scripts.images import drawn, pixels
from accel.bench.scripts.pipelines import add_lora, flux, flux_prompt, flux_transformer, sdxl
from accel.bench.scripts.script import Built, Script, Size, script


def painted(pipe: Any, size: Size, steps: int = 4) -> torch.Tensor:
    """An image of Flux."""
    return drawn(pipe, size, steps, prompt=None, **flux_prompt(size))


def placed(
    name: str, about: str, make: Callable, change: Callable[[Any, Size], object], steps: int = 4, **more: Any
) -> Script:
    """A script of one call of SDXL or Flux, changed before."""

    def build(size: Size) -> Built:
        pipe = make(size)
        change(pipe, size)
        if make is flux:
            return pipe, lambda: painted(pipe, size, steps)
        return pipe, lambda: drawn(pipe, size, steps, **pixels(size, 1024))

    return Script(name, about, build, **more)


def _grouped(**given: Any) -> Callable[[Any, Size], None]:
    def change(pipe: Any, size: Size) -> None:
        pipe.enable_group_offload(onload_device=size.device, offload_device=torch.device("cpu"), **given)

    return change


def _calling(method: str) -> Callable[[Any, Size], object]:
    return lambda pipe, size: getattr(pipe, method)()


def _in_fp8(pipe: Any, size: Size) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=size.fp16)


def _with_lora(pipe: Any, size: Size) -> None:
    add_lora(pipe.transformer, rank=size(16, 4))


LEAF, STREAMED_LEAF = _grouped(offload_type="leaf_level"), _grouped(offload_type="leaf_level", use_stream=True)
BLOCK, STREAMED_BLOCK = (
    _grouped(offload_type="block_level", num_blocks_per_group=1, **more) for more in ({}, {"use_stream": True})
)
WHOLE, MODULES = _calling("enable_model_cpu_offload"), _calling("enable_sequential_cpu_offload")
PLACED = (
    placed("sdxl-model-offload", "SDXL, 10 steps, enable_model_cpu_offload", sdxl, WHOLE, 10, cards=1),
    placed("sdxl-sequential-offload", "SDXL, 2 steps, enable_sequential_cpu_offload", sdxl, MODULES, 2, cards=1),
    placed("sdxl-leaf-offload", "SDXL, 4 steps, group offload by leaf with a stream", sdxl, STREAMED_LEAF, cards=1),
    placed("sdxl-leaf-offload-sync", "SDXL, 2 steps, group offload by leaf without a stream", sdxl, LEAF, 2),
    placed("flux-block-offload", "Flux, 4 steps, group offload by block with a stream", flux, STREAMED_BLOCK, cards=1),
    placed("sdxl-block-offload", "SDXL, 4 steps, group offload by block without a stream", sdxl, BLOCK),
    placed("sdxl-layerwise-fp8", "SDXL, 10 steps, enable_layerwise_casting to fp8", sdxl, _in_fp8, 10),
    placed("flux", "Flux, 4 steps at 1024 px", flux, lambda pipe, size: None),
    placed("flux-lora", "Flux, 4 steps, a LoRA of rank 16, not fused", flux, _with_lora, packages=("peft",)),
)


@script("flux-gguf", "Flux with 7 of 19 and 13 of 38 blocks, 4 steps, linears as GGUF Q8_0", packages=("gguf",))
def gguf(size: Size) -> Built:
    depth = size(dict(num_layers=7, num_single_layers=13), dict(num_layers=1, num_single_layers=1))
    model = flux_transformer(size, **depth)
    with torch.no_grad():
        FORMATS["Q8_0"][1](model, linears_of_blocks(model))
    pipe = flux(size, model.requires_grad_(False))
    return pipe, lambda: painted(pipe, size)
