"""What the step cache keeps of a UNet's deep layers between calls, in memory that CUDA graphs may refer to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Features:
    """What one track keeps: the deep layers' output at the last two whole calls, and the shapes of what blocks return.

    Allocated once, in ordinary memory, so that the CUDA graphs of whole calls may write and those of calls between
    read it. `number` is in the key of those graphs and never given twice.
    """

    last: torch.Tensor  # these three from the first `record` on
    previous: torch.Tensor
    weight: torch.Tensor

    def __init__(self, number: int):
        self.number, self.recorded = number, False
        self.blanks: dict[str, Any] = {}

    def shift(self, first: bool) -> None:
        """Before a whole call: what was last is previous now. Before a loop's first nothing is, not even NaN."""
        if self.recorded:
            self.previous.zero_() if first else self.previous.copy_(self.last)

    def aim(self, weight: float) -> None:
        """Where on the line the next call is: 1 is the last whole call, 2 as far beyond it as the previous is back."""
        self.weight.fill_(weight)

    def record(self, hidden: torch.Tensor) -> None:
        """In a whole call; may be done again, as capturing a graph does."""
        if not self.recorded:
            with torch.inference_mode(False), torch.no_grad():
                _outside_capture(hidden)
                self.last, self.previous = torch.zeros_like(hidden), torch.zeros_like(hidden)
                self.weight = torch.ones((), dtype=hidden.dtype, device=hidden.device)
            self.recorded = True
        self.last.copy_(hidden)

    def extrapolated(self) -> torch.Tensor:
        return torch.lerp(self.previous, self.last, self.weight)

    def note(self, path: str, output: object) -> None:
        """Remembers the shapes of a block's output, as zeros that take no memory."""
        if path not in self.blanks:
            with torch.inference_mode(False), torch.no_grad():
                self.blanks[path] = pytree.tree_map(_blank, output)

    def blank(self, path: str) -> Any:
        """What a block that does not run returns; the UNet may add to the first tensor in place."""
        blank = self.blanks[path]
        return blank.clone() if isinstance(blank, torch.Tensor) else (blank[0].clone(), *blank[1:])


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    _outside_capture(tensor)
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _outside_capture(tensor: torch.Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the step cache would keep features in the memory of a CUDA graph")


@dataclass(frozen=True)
class StepCall:
    """What one call of the UNet is to do."""

    features: Features
    whole: bool
