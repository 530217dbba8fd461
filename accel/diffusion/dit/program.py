"""A recorded forward as data: values, and the calls of torch that made them, in order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

CONCATENATIONS = ("cat", "concat")


class Ref(NamedTuple):
    """A tensor in the arguments or results of a step, by its number among the values of the program."""

    number: int


@dataclass
class TensorValue:
    """What is known of a tensor. base: the value whose memory it is a view of, else its own number.

    root: where it comes from, ("input", place) or ("weight", path); None for one that a step makes. pinned: its memory
    is written in place, so it is computed only by the steps as recorded.
    """

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int
    root: tuple[str, Any] | None = None
    pinned: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def dense(self) -> bool:
        """Whether its elements fill its memory, in whatever order of dimensions."""
        needed = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
            if stride != needed:
                return False
            needed *= size
        return True


@dataclass
class TorchStep:
    """One call of a function of torch, with a Ref in the place of each tensor. writes: into memory that was there."""

    function: Callable
    name: str
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    writes: bool = False

    @property
    def taken(self) -> list[int]:
        return list(refs((self.args, self.kwargs)))

    @property
    def made(self) -> list[int]:
        """The values that are new: what writes in place returns what it was given."""
        taken = set(self.taken)
        return [number for number in refs(self.result) if number not in taken]


@dataclass
class Program:
    """steps: in the order of the calls. result: what the forward returned, with Refs."""

    values: list[TensorValue] = field(default_factory=list)
    steps: list[TorchStep] = field(default_factory=list)
    result: Any = None

    def add(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Ref:
        """A new value, contiguous in memory of its own."""
        number, stride = len(self.values), torch.empty(shape, device="meta").stride()
        self.values.append(TensorValue(number, shape, stride, 0, dtype, device, number))
        return Ref(number)

    def joined_dim(self, step: TorchStep) -> int | None:
        """The dimension of the result, counted from the last, along which a step joins tensors; None of others."""
        if step.name not in (*CONCATENATIONS, "stack") or not isinstance(step.result, Ref) or not step.taken:
            return None
        dim = step.kwargs.get("dim", step.args[1] if len(step.args) > 1 else 0)
        return dim - len(self.values[step.result.number].shape) if dim >= 0 else dim

    def makers(self) -> dict[int, int]:
        """The place of the step that makes each value."""
        return {number: place for place, step in enumerate(self.steps) for number in step.made}

    def users(self) -> dict[int, list[int]]:
        """The places of the steps that take each value, each once."""
        found: dict[int, list[int]] = {value.number: [] for value in self.values}
        for place, step in enumerate(self.steps):
            for number in dict.fromkeys(step.taken):
                found[number].append(place)
        return found


def refs(tree: Any) -> Iterator[int]:
    """Numbers of the values in nested tuples, lists, dicts and slices."""
    if isinstance(tree, Ref):
        yield tree.number
    elif isinstance(tree, tuple | list):
        for one in tree:
            yield from refs(one)
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from refs(one)
    elif isinstance(tree, slice):
        yield from refs((tree.start, tree.stop, tree.step))


def replaced(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with leaf(one) for everything in it that is no tuple, list, dict or slice; of the same types."""
    if isinstance(tree, Ref):
        return leaf(tree)
    if isinstance(tree, tuple | list):
        members = [replaced(one, leaf) for one in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*members)
        kind = type(tree) if type(tree) in (tuple, list, torch.Size) else tuple
        return kind(members)
    if isinstance(tree, dict):
        return {name: replaced(one, leaf) for name, one in tree.items()}
    if isinstance(tree, slice):
        return slice(*(replaced(one, leaf) for one in (tree.start, tree.stop, tree.step)))
    return leaf(tree)
