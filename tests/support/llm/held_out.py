"""The shipped language model and its texts, and bytes that live beside a model."""

import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FOLDER = Path(__file__).parents[3] / "examples" / "models" / "tiny-lm"
HELD_OUT = FOLDER / "held_out.txt"
CALIBRATION = Path(__file__).with_name("training_text.txt")  # of what it was trained on


class LiveBytes(TorchDispatchMode):
    """While entered, counts what operations make that is not in the memory of what they are given.

    counts: of which tensors. start: what the model held of them; most, most_tensors: the most at a time. peak: beyond
    what the model held. A file that is loaded is no operation's.
    """

    def __init__(self, model: nn.Module | None = None, counts: Callable[[torch.Tensor], bool] = lambda tensor: True):
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.counts, self.now, self.most, self.most_tensors = counts, 0, 0, 0
        for tensor in () if model is None else (*model.parameters(), *model.buffers()):
            self._count(tensor)
        self.start = self.most = self.now

    @property
    def peak(self) -> int:
        return self.most - self.start

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs or {})) if type(leaf) is torch.Tensor}
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and id_of(leaf) not in given:
                self._count(leaf)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or not self.counts(tensor):  # of some size, and no memory
            return
        key = id_of(tensor)
        if key not in self.sizes:
            storage = tensor.untyped_storage()
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.most, self.most_tensors = max(self.most, self.now), max(self.most_tensors, len(self.sizes))
            weakref.finalize(storage, self._dead, key)

    def _dead(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def id_of(tensor: torch.Tensor) -> int:
    """Of its storage: free for another as soon as this one dies."""
    return tensor.untyped_storage()._cdata
