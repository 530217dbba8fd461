"""What users do to a pipeline between two calls, as a table; the tests on CPU and GPU run stock and ours through it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from support.diffusion.adapters import (
    controlnet,
    derived,
    forget_tokens,
    image_embeddings,
    ip_adapter,
    left_half,
    lora,
    page,
    random,
    t2i_adapter,
    textual_inversion,
)

PROMPT = "a handwritten seven"


@dataclass(frozen=True)
class Change:
    """steps: functions of (pipe, folder), a call after each; where one returns another pipeline, that is called.

    call: keyword arguments of the calls, or a function of the pipeline that gives them. reverse: how users take the
    change back; None where they cannot. shows: whether stock draws something else after the first step. graphs:
    whether the UNet runs from a graph afterwards. slack: where rounding is coarser, how much more may differ. cpu:
    why it cannot be had on a CPU.
    """

    name: str
    steps: tuple[Callable, ...]
    call: Callable | dict = field(default_factory=dict)
    reverse: Callable | None = None
    shows: bool = True
    graphs: bool = True
    slack: float = 1
    cpu: str = ""

    def arguments(self, pipe) -> dict:
        return self.call(pipe) if callable(self.call) else self.call

    def arguments_before(self) -> dict:
        """What of it stock can take before the change."""
        call = {} if callable(self.call) else self.call
        return {name: call[name] for name in ("prompt", "height", "width") if name in call}


def draw(pipe, steps: int = 2, **call) -> np.ndarray:
    """(N, H, W, 3) in 0..1, or latents, from a fixed seed."""
    call = {"prompt": PROMPT, "num_inference_steps": steps, "output_type": "np"} | call
    images = pipe(generator=torch.Generator().manual_seed(0), **call).images
    return images if isinstance(images, np.ndarray) else images.float().cpu().numpy()


def rms(ours: np.ndarray, stock: np.ndarray) -> float:
    assert ours.shape == stock.shape and np.isfinite(stock).all()
    return float(np.sqrt(((ours - stock) ** 2).mean()))


def offload_in_groups(kind: str) -> Callable:
    def enable(pipe, folder):
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        pipe.enable_group_offload(pipe.device, offload_type=kind, **blocks)

    return enable


def onload_groups(pipe) -> None:
    """diffusers has no method of the pipeline for it; this is what its own tests do."""
    device = pipe._execution_device
    for model in models(pipe).values():
        for module in model.modules():
            if hasattr(module, "_diffusers_hook"):
                module._diffusers_hook.remove_hook("group_offloading", recurse=False)
    pipe.to(device)


def remove_hooks(pipe) -> None:
    device = pipe._execution_device
    pipe.remove_all_hooks()
    pipe.to(device)


WIDER = {torch.float16: torch.float32, torch.float32: torch.float64}
NARROWER = {wide: narrow for narrow, wide in WIDER.items()}


def other_weights(pipe, folder) -> None:
    state = {name: tensor + random(tensor.shape, 8, 0.02).to(tensor) for name, tensor in pipe.unet.state_dict().items()}
    pipe.unet.load_state_dict(state)


def second_pipeline(pipe, folder):
    """Of the same models, with a scheduler of its own."""
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    other = type(pipe)(**pipe.components | {"scheduler": scheduler})
    other.set_progress_bar_config(disable=True)
    return other


def models(pipe) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


def parts(pipe) -> dict[str, object]:
    """All of a pipeline that calls and changes may leave a trace in."""
    return models(pipe) | {"scheduler": pipe.scheduler, "the pipeline itself": pipe}


def do(action: Callable) -> Callable:
    """A step that needs no file, and gives no other pipeline."""

    def step(pipe, folder):
        action(pipe)

    return step


CHANGES = (
    Change(
        "lora",
        (
            lora("style"),
            do(lambda p: p.set_adapters("style", 0.5)),
            do(lambda p: p.disable_lora()),
            do(lambda p: p.enable_lora()),
            do(lambda p: p.fuse_lora(lora_scale=0.7)),
            do(lambda p: p.unfuse_lora()),
        ),
        reverse=lambda p: p.unload_lora_weights(),
    ),
    Change(
        "two-loras",
        (
            lora("style"),
            lora("detail", 1),
            do(lambda p: p.set_adapters(["style", "detail"], [0.3, 0.8])),
            do(lambda p: p.set_adapters("detail")),
            do(lambda p: p.delete_adapters("style")),
        ),
        reverse=lambda p: p.unload_lora_weights(),
    ),
    Change(
        "lora-scaled-in-the-call",
        (lora("style"),),
        call={"cross_attention_kwargs": {"scale": 0.3}},
        reverse=lambda p: p.unload_lora_weights(),
    ),
    Change(
        "lora-hotswapped",  # of the UNet alone: diffusers refuses it for text encoders
        (lora("style", parts=("unet",)), lora("style", 1, parts=("unet",), hotswap=True)),
        reverse=lambda p: p.unload_lora_weights(),
    ),
    Change("lora-fused-for-good", (lora("style"), do(lambda p: p.fuse_lora()), do(lambda p: p.unload_lora_weights()))),
    Change(
        "ip-adapter",
        (ip_adapter, do(lambda p: p.set_ip_adapter_scale(0.4)), do(lambda p: p.set_ip_adapter_scale(0.0))),
        call=image_embeddings,
        reverse=lambda p: p.unload_ip_adapter(),
    ),
    Change("textual-inversion", (textual_inversion,), call={"prompt": "a handwritten <style>"}, reverse=forget_tokens),
    Change(
        "freeu",
        (do(lambda p: p.enable_freeu(0.9, 0.2, 1.3, 1.4)), do(lambda p: p.enable_freeu(0.8, 0.3, 1.1, 1.2))),
        reverse=lambda p: p.disable_freeu(),
    ),
    Change("img2img", (derived("Img2Img"),), call={"image": page(), "strength": 1.0}),
    Change("inpaint", (derived("Inpaint"),), call={"image": page(), "mask_image": left_half(), "strength": 1.0}),
    Change("controlnet", (derived("ControlNet", controlnet=controlnet),), call={"image": page()}),
    Change("t2i-adapter", (derived("Adapter", adapter=t2i_adapter),), call={"image": page()}),
    Change("second-pipeline", (second_pipeline,), shows=False),
    Change("other-weights", (other_weights,)),
    Change(
        "wider-dtype",
        (do(lambda p: p.to(WIDER[p.dtype])),),
        reverse=lambda p: p.to(NARROWER[p.dtype]),
    ),
    Change("bfloat16", (do(lambda p: p.to(torch.bfloat16)),), shows=False, slack=8),
    Change("progress-bar", (do(lambda p: p.set_progress_bar_config(disable=True, leave=False)),), shows=False),
    Change(
        "vae-tiling-and-slicing",
        (do(lambda p: p.vae.enable_tiling()), do(lambda p: p.vae.enable_slicing())),
        call={"prompt": [PROMPT, "three"], "height": 96, "width": 80},
        reverse=lambda p: (p.vae.disable_tiling(), p.vae.disable_slicing()),
    ),
    Change(
        "joint-projections",
        (do(lambda p: p.fuse_qkv_projections()),),
        reverse=lambda p: p.unfuse_qkv_projections(),
        shows=False,
    ),
    Change(
        "attention-slicing",
        (do(lambda p: p.enable_attention_slicing(1)),),
        reverse=lambda p: p.disable_attention_slicing(),
        shows=False,
    ),
    Change(
        "another-device",
        (do(lambda p: p.to("cpu")),),
        reverse=lambda p: p.to("cuda"),
        shows=False,
        graphs=False,
        cpu="there is no other device",
    ),
    Change("layerwise-casting", (do(lambda p: p.unet.enable_layerwise_casting(torch.float8_e4m3fn, p.unet.dtype)),)),
    Change(
        "model-offload",
        (do(lambda p: p.enable_model_cpu_offload(device=p.device)),),
        reverse=remove_hooks,
        shows=False,
    ),
    Change(
        "sequential-offload",
        (do(lambda p: p.enable_sequential_cpu_offload(device=p.device)),),
        reverse=remove_hooks,
        shows=False,
        graphs=False,
        cpu="accelerate cannot offload a text encoder's buffers from CPU to CPU (TypeError in stock)",
    ),
    Change("block-offload", (offload_in_groups("block_level"),), reverse=onload_groups, shows=False, graphs=False),
    Change("leaf-offload", (offload_in_groups("leaf_level"),), reverse=onload_groups, shows=False, graphs=False),
)
