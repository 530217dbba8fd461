"""A stack of a transformer's blocks, one after the other over the same rows: what they add, and to what."""

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from accel.diffusion.step_cache.features import Features
from accel.diffusion.step_cache.tracks import PLAIN


@dataclass(frozen=True)
class BlockStack:
    """A list of blocks. kept: how many of the first run in every call."""

    name: str
    size: int
    kept: int

    def path(self, index: int) -> str:
        return f"{self.name}.{index}"


class PassedRows(NamedTuple):
    """How rows flow through a stack.

    into: for each value that a block returns, the next block's argument; None for what is no tensor. middle, last: what
    inner blocks and the last one return, with TENSOR in the place of tensors.
    """

    into: tuple[str | None, ...]
    middle: Any
    last: Any

    def passed(self, given: dict) -> Any:
        """What a block that adds nothing would return."""
        names = iter(self.into)
        return pytree.tree_map(lambda one: one if (name := next(names)) is None else given[name], self.middle)

    def ended(self, given: dict, name: str, features: Features) -> Any:
        """What the last block returns, with the extrapolated sum of what all skipped blocks add."""
        places = itertools.count()

        def added(one: object) -> object:
            at = next(places)
            return given[self.into[at]] + features.extrapolated(f"{name}.{at}") if one is TENSOR else one

        return pytree.tree_map(added, self.last)


TENSOR = "a tensor"


class StackTrace:
    """One whole call, as seen by the blocks of a stack. reason: why rows cannot bypass these blocks.

    The tensors that a block returns have to be arguments of the next one, unchanged, and nobody else's.
    """

    def __init__(self, stack: BlockStack):
        self.stack = stack
        self._begin()

    def _begin(self) -> None:
        self.next = 0
        self.finished = False
        self.reason: str | None = None
        self.into: tuple[str | None, ...] | None = None
        self.middle: Any = None
        self.outputs: list = []
        self.versions: list = []
        self.entry: dict[str, torch.Tensor] = {}
        self.passing: list[tuple[int, weakref.ref]] = []

    def enter(self, index: int, given: dict) -> None:
        """Before a block is called."""
        if index == 0:
            self._begin()  # as capturing a graph does, more than once
        if index != self.next:
            self._refuse(f"{self.stack.path(index)} is called where {self.stack.path(self.next)} is expected")
        if self.reason is not None:
            return
        if index:
            self._follow(index, given)
        if index == self.stack.kept:
            self.entry = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if index == self.stack.size - 1:
            self._alone(given)

    def leave(self, index: int, output: Any, features: Features) -> None:
        """After it has returned."""
        self.next = index + 1
        if self.reason is not None:
            return
        leaves = pytree.tree_leaves(output)
        if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
            return self._refuse(f"{self.stack.path(index)} returns a {type(output).__name__}")
        made = pytree.tree_map_only(torch.Tensor, lambda _: TENSOR, output)
        if index == self.stack.size - 1:
            return self._finish(leaves, made, features)
        if self.middle not in (None, made):
            return self._refuse(f"{self.stack.path(index)} returns something else than the block before it")
        self.middle, self.outputs = made, leaves
        self.versions = [_version(leaf) for leaf in leaves]
        if index >= self.stack.kept:
            self.passing += [(index, weakref.ref(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _follow(self, index: int, given: dict) -> None:
        """Finds the arguments by which a block takes what the block before returned."""
        before = self.stack.path(index - 1)
        if self.versions != [_version(leaf) for leaf in self.outputs]:
            return self._refuse(f"what {before} gives is changed before the next block takes it")
        into = []
        for leaf in self.outputs:
            names = [name for name, value in given.items() if value is leaf] if isinstance(leaf, torch.Tensor) else []
            if isinstance(leaf, torch.Tensor) and not names:
                return self._refuse(f"what {before} gives is changed before the next block takes it")
            into.append(names[0] if names else None)
        if self.into not in (None, tuple(into)):
            return self._refuse(f"{self.stack.path(index)} takes its rows otherwise than the block before it")
        self.into, self.outputs = tuple(into), []

    def _alone(self, given: dict) -> None:
        """Refuses where a tensor that a block returned is still referenced, but for the last block's arguments."""
        taken = {id(value) for value in given.values()}
        for index, reference in self.passing:
            tensor = reference()
            if tensor is not None and id(tensor) not in taken:
                return self._refuse(f"what {self.stack.path(index)} gives is kept by more than the next block")

    def _finish(self, leaves: list, last: Any, features: Features) -> None:
        into, name = self.into, self.stack.name
        assert into is not None  # there are two blocks at least
        pairs = {}
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                before = self.entry.get(into[at] or "") if at < len(into) else None
                if before is None or _form(leaf) != _form(before):
                    path = self.stack.path(self.stack.size - 1)
                    return self._refuse(f"{path} gives other rows than the blocks before it take")
                pairs[at] = leaf, before
        for at, (leaf, before) in pairs.items():
            features.record(f"{name}.{at}", leaf, before)
        features.rows[name] = PassedRows(into, self.middle, last)
        self.entry, self.passing, self.finished = {}, [], True

    def _refuse(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.entry, self.passing, self.outputs = {}, [], []


def _form(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _version(leaf: object) -> int | None:
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


@dataclass(frozen=True)
class StepCall:
    """What one call of a denoiser is to do, and what it has shown.

    traces: of the stacks, by name, in a whole call. entered, ended: the stacks whose blocks, and whose last block, were
    called in a call between whole ones.
    """

    features: Features
    whole: bool
    traces: dict[str, StackTrace] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)

    def misfit(self, stacks: tuple[BlockStack, ...]) -> str | None:
        """Why rows cannot bypass the blocks, after a whole call; None too where a graph ran, which shows nothing."""
        for stack in stacks if self.traces else ():
            trace = self.traces.get(stack.name)
            if trace is None:
                return f"{stack.name} are not called"
            if not trace.finished:
                return trace.reason or f"{stack.path(stack.size - 1)} is not called"
        return None
