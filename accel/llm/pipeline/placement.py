"""Which layer of a model is on which device, where accelerate's hooks bring hidden states from one to the next.

`device_map="auto"` puts a hook on the model, on every layer, and on every module inside of one that has weights. Those
inside a layer have nothing to do: all of it is on one device, to which the layer's own hook brings what it is called
with. So they are taken off while the model is optimized, and stock code computes the same without them. A layer's own
hook stays; fused, a layer stands in its place.
"""

from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from accel.errors import PatchConflict
from accel.libraries.hooks import BENEATH, FORWARD, HOOK, hook_of
from accel.llm.pipeline.device_hooks import device_of, other_hook, same_place
from accel.llm.recording.record import NotUnderstood
from accel.llm.recording.recorder import decoder_layers
from accel.patching.structure import stock_method


class Placement(NamedTuple):
    """Layers of a model with hooks of accelerate. devices: of each; they may all be the same."""

    layers: tuple[nn.Module, ...]
    devices: tuple[torch.device, ...]

    def stretches(self) -> list[range]:
        """Numbers of layers that follow each other on one device."""
        starts = [n for n, device in enumerate(self.devices) if not n or device != self.devices[n - 1]]
        return [range(*ends) for ends in zip(starts, [*starts[1:], len(self.devices)], strict=True)]

    def description(self) -> str:
        """For the report."""
        found = (f"{s.start}-{s.stop - 1} on {self.devices[s.start]}" for s in self.stretches())
        return f"layers {', '.join(found)}"


def layer_placement(model: PreTrainedModel) -> Placement | str | None:
    """Where the layers are; why they cannot be run fused there; None for a model without hooks on one device."""
    hooked = any(HOOK in vars(module) for module in model.modules())
    if not hooked:
        several = len({parameter.device for parameter in model.parameters()}) > 1
        return "weights on several devices, and no hooks of accelerate between them" if several else None
    for path, module in model.named_modules():
        if (reason := other_hook(module)) is not None:
            return f"{reason}, on {path or 'the model'}"
    if not getattr(hook_of(model), "io_same_device", False):
        return "no hook of accelerate gives its logits back where its inputs are"
    try:
        path, layers = decoder_layers(model)
    except NotUnderstood as reason:
        return str(reason)
    devices = []
    for number, layer in enumerate(layers):
        device = device_of(layer)
        if device is None or vars(layer)[HOOK].io_same_device:
            return f"{path}.{number} has no hook of accelerate that brings its inputs"
        tensors = chain(layer.parameters(), layer.buffers())
        inside = (found for module in layer.modules() if (found := device_of(module)) is not None)
        if not all(same_place(t.device, device) for t in tensors) or any(found != device for found in inside):
            return f"{path}.{number} is on several devices"
        devices.append(device)
    return Placement(tuple(layers), tuple(devices))


class LiftedHooks:
    """Takes the hooks inside of layers off; a `Change`."""

    def __init__(self, layers: tuple[nn.Module, ...]):
        self.layers = layers
        self.lifted: list[tuple[nn.Module, object, nn.Module, dict]] = []

    def apply(self) -> None:
        self.lifted = []
        for layer in self.layers:
            for module in layer.modules():
                attributes = vars(module)
                if module is not layer and HOOK in attributes:
                    held = {name: attributes.pop(name) for name in (HOOK, BENEATH, FORWARD)}
                    self.lifted.append((layer, vars(layer)[HOOK], module, held))

    def check(self) -> None:
        """Raises PatchConflict where a hook has been put on since."""
        for *_, module, _ in self.lifted:
            if HOOK in vars(module):
                raise PatchConflict(
                    f"a hook was put on a {type(module).__name__} after accel.optimize: {vars(module)[HOOK]!r}; "
                    "remove it first, then call accel.restore"
                )

    def undo(self) -> None:
        """Puts them back, but into layers whose own hook is another, or was taken off."""
        for layer, hook, module, held in reversed(self.lifted):
            attributes = vars(module)
            own = attributes.get(FORWARD)
            if hook_of(layer) is hook and (own is None or stock_method(module, own)):
                attributes.update(held)
        self.lifted = []
