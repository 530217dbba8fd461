"""A model that is run only to be looked at: whether that would be noticed, and how it is as it was afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from accel.in_flight import alone
from accel.libraries.tensor_parallel import pipeline_stage
from accel.llm.pipeline.device_hooks import other_hook
from accel.llm.recording.record import NotUnderstood
from accel.offload.call_hooks import BlockHook, StreamedCall
from accel.offload.merging import MergeTogether
from accel.patching.rule import set_data
from accel.patching.structure import foreign_hooks, placement
from accel.quantization.experts import holds_numbers

WRITES = "its forward writes into its weights"
STREAMING = (StreamedCall, BlockHook, MergeTogether)
READS = ("__int__", "__index__", "__invert__")


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


class Writes(NotUnderstood):
    """A forward that writes into its weights: no other look at it is worth that."""


class Unwritten(TorchFunctionMode):
    """Inside, a forward that writes into the model's weights, as RWKV's first one does, raises before: to look at it
    must not change them. One that leaves others in their places raises afterwards, as these are taken out. Packed ones
    may be packed anew, as bitsandbytes does on a CPU.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.held = [(one, one.detach()) for one in model.parameters() if one.is_floating_point()]
        self.places = {_place(one) for one, _ in self.held} - {0}

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        others = [pair for pair in self.held if pair[0].device == pair[1].device and _place(pair[0]) != _place(pair[1])]
        for one, before in others:
            set_data(one, lambda _, before=before: before)
        if others:
            raise Writes(WRITES)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        written = [(kwargs or {}).get("out")]
        if args and _writes(func):
            written.append(args[0])
        if any(isinstance(one, torch.Tensor) and _place(one) in self.places for one in tree_leaves(written)):
            raise Writes(WRITES)
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> int:
    """Where the memory begins that it lies in; 0 where it has none of its own, as of several tensors or under vmap."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _writes(function: Any) -> bool:
    """Whether a function of torch writes into its first argument."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in READS)
    return name.endswith("_")


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
    changeable: list[Any] = [one for m in modules for one in (vars(m), m._modules, m._parameters, m._forward_hooks)]
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
    """Leaves what tells of calls to weights that stream: these may have been placed anew meanwhile."""
    kept = {name: value for name, value in now.items() if type(value) in STREAMING}
    before = {name: value for name, value in before.items() if type(value) not in STREAMING} | kept
    if len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values())):
        return
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if now.get(name) is not value or name not in now:
            now[name] = value
