"""The shipped language model and its texts, and bytes that live beside a model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from accel.bench.memory import LivingTensors

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-lm"
HELD_OUT = FOLDER / "held_out.txt"
CALIBRATION = Path(__file__).with_name("training_text.txt")  # of what it was trained on


class LiveBytes(LivingTensors):
    """Of what has memory. A file that is loaded is no operation's.

    start: what the model held; most_tensors: the most at a time. peak: beyond what the model held.
    """

    def __init__(self, model: nn.Module | None = None, counts: Callable[[torch.Tensor], bool] = lambda tensor: True):
        super().__init__(lambda tensor: not tensor.is_meta and counts(tensor))
        self.most_tensors = 0
        for tensor in () if model is None else (*model.parameters(), *model.buffers()):
            self.count(tensor)
        self.start = self.most

    @property
    def peak(self) -> int:
        return self.most - self.start

    def count(self, tensor: torch.Tensor) -> None:
        super().count(tensor)
        self.most_tensors = max(self.most_tensors, len(self.sizes))
