"""Adapters that somebody merges into weights of which some stream."""

import threading
from typing import Any

from torch import nn

from accel.libraries.adapters import BASE
from accel.offload.layout import as_ordinary, become, weights_in
from accel.offload.piece import WeightPlacement
from accel.patching.owner import InstanceMethod

MERGES = ("merge", "unmerge")


class MergeTogether(InstanceMethod):
    """Stands in the place of one of `MERGES`, of a layer with adapters. Between calls these may be on the GPU, and what
    they are merged into on the CPU: all of the layer is there meanwhile.
    """

    computes = False

    def __init__(self, streamed: Any, layer: nn.Module, name: str):
        self.streamed, self.layer, self.name = streamed, layer, name

    @property
    def owner(self) -> nn.Module:
        return self.layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.streamed.caller == threading.get_ident():  # within a call
            return self.stock(*args, **kwargs)
        moving = (piece for _, piece in self.streamed.numbers.values() if piece.placement is WeightPlacement.RING)
        here = {id(slot.tensor) for piece in moving for slot in piece.layout.slots}
        held = weights_in(self.layer)
        away = [one for one in held if id(one) not in here]
        places = [(one, one.data) for one in away] if len(away) < len(held) else []
        with as_ordinary():
            for one, place in places:
                become(one, place.to("cpu", copy=True))
        try:
            return self.stock(*args, **kwargs)
        finally:
            with as_ordinary():
                for one, place in places:
                    become(one, place.copy_(one))


def tell_of_merging(streamed: Any, wanted: bool) -> None:
    """Layers with adapters tell this model of it from now on, or no more."""
    for layer in streamed.model.modules():
        for name in MERGES:
            held = vars(layer).get(name)
            tells, will = isinstance(held, MergeTogether), wanted and BASE in layer._modules and hasattr(layer, name)
            if tells and not (will and held.streamed is streamed):
                del vars(layer)[name]
            if will and name not in vars(layer):
                vars(layer)[name] = MergeTogether(streamed, layer, name)
