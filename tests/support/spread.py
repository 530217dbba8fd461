"""Models with accelerate's hooks, as `device_map="auto"` leaves them, on one CPU.

"cpu:0" is the same CPU to a tensor and another device to whoever compares names: what is brought there is copied, and
whatever is kept there is kept apart.
"""

import torch
from accelerate import dispatch_model
from torch import nn

from accel.llm.pipeline.device_hooks import HOOK
from support.llm.families import layers

DEVICES = (torch.device("cpu"), torch.device("cpu:0"))


def spread(model: nn.Module, first: int = 2) -> nn.Module:
    """The model, dispatched: its layers from this one on are on a device of their own, as far as hooks know."""
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    for layer in list(layers(model).values())[first:]:
        for module in layer.modules():
            if HOOK in vars(module):
                vars(module)[HOOK].execution_device = DEVICES[1]
    return model
