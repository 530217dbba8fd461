"""A model that is run only to be looked at: whether that would be noticed, and how it is as it was afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn

from accel.in_flight import alone
from accel.libraries.tensor_parallel import pipeline_stage
from accel.llm.pipeline.device_hooks import other_hook
from accel.patching.structure import foreign_hooks, placement
from accel.quantization.experts import holds_numbers


def model_side_effects(model: nn.Module) -> str | None:
    """Why running the model only to look at it would be noticed, or would not show what its calls do."""
    for path, module in model.named_modules():
        where = path or "the model"
        if (hook := other_hook(module)) is not None:
            return f"{hook}, on {where}"
        if (stage := pipeline_stage(module)) is not None:
            size = getattr(stage, "pp_size", "?")
            return f"pp_size={size}: each process holds some of the layers, and its calls wait for the others"
        if path and foreign_hooks(module):
            return f"forward hooks on {where}, which examining it would call"
    return None


@contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in inference mode without gradients or autocast; where it was in training mode, no other
    thread is in it. After, it is as it was, whatever it keeps from call to call: some rotary embeddings remember the
    longest text.
    """
    with alone(*([model] if any(module.training for module in model.modules()) else [])), _resting(model):
        yield


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    modules = list(model.modules())
    # BigBird puts other modules in their places; transformers hooks what a call gives.
    changeable: list[Any] = [one for m in modules for one in (vars(m), m._modules, m._forward_hooks)]
    attributes = [(one, dict(one)) for one in changeable]
    buffers = [(one._buffers, {n: _copied(b, one) for n, b in one._buffers.items()}) for one in modules]
    try:
        for module in modules:
            module.training = False
        kind = placement(model)[0].type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    finally:
        for now, before in attributes:
            _put_back(now, before)
        for now, before in buffers:
            for buffer, held in before.values():
                if buffer is not None and held is not None and not torch.equal(buffer, held):
                    with torch.inference_mode():
                        buffer.copy_(held)
            _put_back(now, {name: buffer for name, (buffer, _) in before.items()})


def _copied(buffer: torch.Tensor | None, module: nn.Module) -> tuple:
    """The buffer, and what it holds, unless it is a weight, which may be put into another place but is not changed."""
    return buffer, None if buffer is None or holds_numbers(module) else buffer.clone()


def _put_back(now: dict, before: dict) -> None:
    if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
        return
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name) is not value or name not in now:
            now[name] = value
