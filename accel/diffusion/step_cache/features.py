"""What the step cache keeps of a denoiser's deep layers between calls, in memory that CUDA graphs may refer to."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


class LinearHistory:
    """One tensor at the last two whole calls; weight: where on the line through both the next call lies."""

    def __init__(self, like: torch.Tensor):
        with torch.inference_mode(False), torch.no_grad():
            _outside_capture(like)
            self.last, self.previous = (torch.zeros_like(like, requires_grad=False) for _ in range(2))
            self.weight = torch.ones((), dtype=like.dtype, device=like.device)

    def fits(self, tensor: torch.Tensor) -> bool:
        mine = self.last
        return (mine.shape, mine.dtype, mine.device) == (tensor.shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        return self.last.nbytes + self.previous.nbytes


class Features:
    """What one track keeps: histories by name, the shapes of what blocks return, and how rows pass a stack.

    Allocated once, in ordinary memory, so that the CUDA graphs of whole calls may write it and others read it. number:
    in the key of those graphs, and never reused. reason: why calls of this kind have to be computed whole. compared: a
    call between whole ones gave what the whole one gave, of the same inputs.
    """

    def __init__(self, numbers: Iterator[int]):
        self.numbers, self.number = numbers, next(numbers)
        self.lines: dict[str, LinearHistory] = {}
        self.blanks: dict[str, Any] = {}
        self.rows: dict[str, Any] = {}
        self.reason: str | None = None
        self.compared = False

    @property
    def nbytes(self) -> int:
        return sum(line.nbytes for line in self.lines.values())

    def shift(self, first: bool) -> None:
        """Before a whole call: the last values become the previous ones. Before a loop's first call there are none."""
        for line in self.lines.values():
            line.previous.zero_() if first else line.previous.copy_(line.last)

    def extrapolate_to(self, weight: float) -> None:
        """Where the next call lies: 1 is the last whole call, 2 as far beyond it as the previous one lies before it."""
        for line in self.lines.values():
            line.weight.fill_(weight)

    def record(self, name: str, after: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Stores a tensor of a whole call, or what was added to `before`. A capture may do it more than once."""
        line = self.lines.get(name)
        if line is None or not line.fits(after):
            if line is not None:  # no graph that was captured with the former may run any more
                self.number = next(self.numbers)
            line = self.lines[name] = LinearHistory(after)
        if before is None:
            line.last.copy_(after)
        else:
            torch.sub(after, before, out=line.last)

    def extrapolated(self, name: str) -> torch.Tensor:
        line = self.lines[name]
        return torch.lerp(line.previous, line.last, line.weight)

    def note(self, path: str, output: object) -> None:
        """Remembers the shapes of a block's output, as zeros that take no memory."""
        if path not in self.blanks:
            with torch.inference_mode(False), torch.no_grad():
                self.blanks[path] = pytree.tree_map(_blank, output)

    def blank(self, path: str) -> Any:
        """What a block that does not run returns. The first tensor is a copy, since the UNet may add to it in place."""
        blank = self.blanks[path]
        return blank.clone() if isinstance(blank, torch.Tensor) else (blank[0].clone(), *blank[1:])


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    _outside_capture(tensor)
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _outside_capture(tensor: torch.Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the step cache would keep features in the memory of a CUDA graph")
