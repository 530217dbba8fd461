"""What is timed: a case with random weights, or a pipeline or model of the user's own from a folder."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel import saved
from accel.bench.diffusion.case import Case, shapes
from accel.bench.weights import SEED
from accel.diffusion.inputs import denoiser_inputs, example_call
from accel.patching.rule import set_data
from accel.planning.targets import models_in
from accel.verification.call import seeded
from accel.verification.metrics import tensors

STEPS = 20  # of a pipeline


@dataclass(frozen=True)
class Subject:
    """An object and calls of it, different ones in turn. call(obj, i): number i, of the object or its copy.

    verified: what `accel.verify` calls. inputs: arguments of the different calls. shapes: of the tensors of one.
    """

    about: str
    obj: Any
    call: Callable[[Any, int], Any]
    verified: Any
    inputs: list[dict]
    shapes: dict = field(default_factory=dict)

    def __call__(self, i: int = 0) -> Any:
        return self.call(self.obj, i)

    def outputs(self, calls: int | None = None) -> list[torch.Tensor]:
        """Of so many calls, or of all different ones; float64 on the CPU."""
        return [tensor for i in range(len(self.inputs) if calls is None else calls) for tensor in tensors(self(i))]


class Decoder(nn.Module):
    """The `decode` of an autoencoder as a model by itself."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, **kwargs: Any) -> Any:
        return self.vae.decode(**kwargs)


def of_case(case: Case, device: torch.device, dtype: torch.dtype) -> Subject:
    """The case with its random weights."""
    module, inputs = case.build(device, dtype), case.inputs(device, dtype)

    def call(module: nn.Module, i: int) -> torch.Tensor:
        return case.call(module, inputs[i % len(inputs)])

    verified = module if case.entry == "forward" else Decoder(module)
    return Subject(case.about, module, call, verified, inputs, shapes(inputs[0]))


def of_folder(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt: str | None = None,
    steps: int | None = None,
    size: int | None = None,
    batch: int | None = None,
) -> Subject:
    """The whole call of a pipeline, or the forward of a single model.

    prompt, steps: of a pipeline. size: of its images in pixels, or of a UNet's latents. batch: images a call.
    Raises ValueError or TypeError for a folder or model that cannot be run.
    """
    obj = saved.load_saved(folder, dtype, device)
    _settle(obj)
    if isinstance(obj, nn.Module):
        if prompt is not None or steps is not None:
            raise ValueError("prompt and steps are for pipelines; this is a single model")
        kwargs = denoiser_inputs(obj, batch, size)
        return Subject(f"{type(obj).__name__}, one forward", obj, _seeded(kwargs), obj, [kwargs], shapes(kwargs))
    obj.set_progress_bar_config(disable=True)
    known = inspect.signature(type(obj).__call__).parameters
    kwargs = example_call(obj) | {"num_inference_steps": steps or STEPS}
    asked = {"prompt": prompt, "height": size, "width": size}
    asked = {name: value for name, value in asked.items() if value is not None}
    if unknown := [name for name in asked if name not in known]:
        raise ValueError(f"a {type(obj).__name__} takes no {' and no '.join(unknown)}")
    kwargs |= asked
    if batch is not None:
        kwargs |= {"prompt": [kwargs["prompt"]] * batch} if "prompt" in kwargs else {"batch_size": batch}
    about = f"{type(obj).__name__}, {kwargs['num_inference_steps']} steps, batch {batch or 1}"
    return Subject(about, obj, _seeded(kwargs, "generator" in known), obj, [kwargs])


def _seeded(kwargs: dict, generator: bool = False) -> Callable[[Any, int], Any]:
    """A call that is the same every time."""

    def call(obj: Any, i: int) -> Any:
        given = {"generator": torch.Generator("cpu").manual_seed(SEED)} if generator else {}
        with seeded(SEED):
            return obj(**kwargs, **given)

    return call


def _settle(obj: Any) -> None:
    """Moves weights out of the file they are mapped from, to where torch allocates; on a GPU they are there already.

    They lie at odd addresses in it, and matrix products on a CPU round by address: stock would not equal itself.
    """
    for model in models_in(obj).values():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                set_data(tensor, torch.clone)
