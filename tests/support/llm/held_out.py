"""The shipped language model and its texts, and bytes that live beside a model."""

import weakref
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-lm"
HELD_OUT = FOLDER / "held_out.txt"
CALIBRATION = Path(__file__).with_name("training_text.txt")  # of what it was trained on


class LiveBytes(TorchDispatchMode):
    """While entered, counts what is made; `peak`: the most at a time, beyond what the model held at the beginning."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._count(tensor)
        self.start = self.most = self.now

    @property
    def peak(self) -> int:
        return self.most - self.start

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:  # of some size, and no memory
            return
        storage = tensor.untyped_storage()
        key = storage._cdata  # free for another as soon as this one dies
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._dead, key)

    def _dead(self, key: int) -> None:
        self.now -= self.sizes.pop(key)
