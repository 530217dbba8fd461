"""Scripts of diffusers that save memory: offloading of every kind, weights in 8 bits, GGUF; and Flux."""

from typing import Any

import torch

from accel.bench.scripts.images import drawn, pixels
from accel.bench.scripts.pipelines import add_lora, flux, flux_prompt, flux_transformer, sdxl
from accel.bench.scripts.script import Built, Size, script


def painted(pipe: Any, size: Size, steps: int = 4) -> torch.Tensor:
    """An image of Flux."""
    return drawn(pipe, size, steps, prompt=None, **flux_prompt(size))


@script("sdxl-model-offload", "SDXL, 10 steps, enable_model_cpu_offload", cards=1)
def model_offload(size: Size) -> Built:
    pipe = sdxl(size)
    pipe.enable_model_cpu_offload()
    return pipe, lambda: drawn(pipe, size, **pixels(size, 1024))


@script("sdxl-sequential-offload", "SDXL, 2 steps, enable_sequential_cpu_offload", cards=1)
def sequential_offload(size: Size) -> Built:
    pipe = sdxl(size)
    pipe.enable_sequential_cpu_offload()
    return pipe, lambda: drawn(pipe, size, 2, **pixels(size, 1024))


def _grouped(pipe: Any, size: Size, **given: Any) -> Any:
    pipe.enable_group_offload(onload_device=size.device, offload_device=torch.device("cpu"), **given)
    return pipe


@script("sdxl-leaf-offload", "SDXL, 4 steps, group offload leaf by leaf with a stream", cards=1)
def leaf_offload(size: Size) -> Built:
    pipe = _grouped(sdxl(size), size, offload_type="leaf_level", use_stream=True)
    return pipe, lambda: drawn(pipe, size, 4, **pixels(size, 1024))


@script("sdxl-leaf-offload-sync", "SDXL, 2 steps, group offload leaf by leaf without a stream")
def leaf_offload_alone(size: Size) -> Built:
    pipe = _grouped(sdxl(size), size, offload_type="leaf_level")
    return pipe, lambda: drawn(pipe, size, 2, **pixels(size, 1024))


@script("flux-block-offload", "Flux, 4 steps at 1024 px, group offload by block with a stream", cards=1)
def block_offload(size: Size) -> Built:
    pipe = flux(size)
    _grouped(pipe, size, offload_type="block_level", num_blocks_per_group=1, use_stream=True)
    return pipe, lambda: painted(pipe, size)


@script("sdxl-block-offload", "SDXL, 4 steps, group offload by block without a stream")
def block_offload_alone(size: Size) -> Built:
    pipe = _grouped(sdxl(size), size, offload_type="block_level", num_blocks_per_group=1)
    return pipe, lambda: drawn(pipe, size, 4, **pixels(size, 1024))


@script("sdxl-layerwise-fp8", "SDXL, 10 steps, enable_layerwise_casting to fp8")
def layerwise(size: Size) -> Built:
    pipe = sdxl(size)
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=size.fp16)
    return pipe, lambda: drawn(pipe, size, **pixels(size, 1024))


@script("flux", "Flux, 4 steps at 1024 px")
def transformer(size: Size) -> Built:
    pipe = flux(size)
    return pipe, lambda: painted(pipe, size)


@script("flux-lora", "Flux, 4 steps, a LoRA of rank 16 loaded and not fused", packages=("peft",))
def transformer_lora(size: Size) -> Built:
    pipe = flux(size)
    add_lora(pipe.transformer, rank=size(16, 4))
    return pipe, lambda: painted(pipe, size)


@script("flux-gguf", "Flux with 7 of 19 and 13 of 38 blocks, 4 steps, linears as GGUF Q8_0", packages=("gguf",))
def gguf(size: Size) -> Built:
    from diffusers.quantizers.gguf.utils import GGUFParameter, _replace_with_gguf_linear
    from gguf import GGMLQuantizationType, quantize

    depth = size(dict(num_layers=7, num_single_layers=13), dict(num_layers=1, num_single_layers=1))
    model = flux_transformer(size, **depth)
    kept = {name: weight.data for name, weight in model.named_parameters()}
    packed = {}
    for name, weight in kept.items():  # as the files of a model are: matrices inside blocks
        if "blocks." in name and weight.ndim == 2:
            data = quantize(weight.float().cpu().numpy(), GGMLQuantizationType.Q8_0)
            packed[name] = GGUFParameter(torch.from_numpy(data), quant_type=GGMLQuantizationType.Q8_0)
    _replace_with_gguf_linear(model, size.bf16, packed)
    for name, weight in packed.items():
        owner, _, own = name.rpartition(".")
        moved = GGUFParameter(weight.to(size.device), quant_type=weight.quant_type)
        model.get_submodule(owner)._parameters[own] = moved
    for name, weight in kept.items():
        owner, _, own = name.rpartition(".")
        if name not in packed:
            model.get_submodule(owner)._parameters[own] = torch.nn.Parameter(weight, requires_grad=False)
    pipe = flux(size, model.eval())
    return pipe, lambda: painted(pipe, size)
