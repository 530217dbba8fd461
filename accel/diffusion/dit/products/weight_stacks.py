"""Weights that a block multiplies together, kept in one storage; noticed where they are not any more."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accel.fusion.stacked_linears import stack_rows, stacked_rows
from accel.patching.rule import unshare

CALLS_BETWEEN_MOVES = 16  # of the same weights, so that moving costs little where they never stay
ANYWHERE = 0  # of the storages of a copy: a pickle gives every view one as large as the whole


class WeightStacks:
    """The stacked weights of one block. Finds the whole of weights that follow one another, and moves them if they do
    not.

    Anything may move them apart: `.to`, offloading, fusing an adapter. So addresses are compared at every call. They
    are moved only while no other thread is inside, which `with` counts.
    """

    def __init__(self) -> None:
        self.__setstate__({"storages": {}})

    def __getstate__(self) -> dict[str, Any]:
        return {"storages": dict.fromkeys(self.storages, ANYWHERE)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.storages: dict[tuple[str, ...], int] = state["storages"]  # addresses of those that were made here
        self.waiting: dict[tuple[str, ...], int] = {}  # calls until these may be moved again
        self.lock, self.inside = threading.RLock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1

    def whole(self, paths: tuple[str, ...], parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The tensor whose rows these are, by their paths in the block; None where each is to be taken by itself."""
        if (found := stacked_rows(parts)) is not None:
            return found
        with self.lock:
            if self.inside <= 1 and self._movable(paths, parts) and self._due(paths):
                stack_rows(parts)
                if parts[0].is_cuda:  # the next to read them may do so on another stream
                    torch.cuda.current_stream(parts[0].device).synchronize()
                found = stacked_rows(parts)
                if found is not None:
                    self.storages[paths] = found.untyped_storage().data_ptr()
        return found

    def _due(self, paths: tuple[str, ...]) -> bool:
        left = self.waiting.get(paths, 0)
        self.waiting[paths] = left - 1 if left else CALLS_BETWEEN_MOVES
        return not left

    def _movable(self, paths: tuple[str, ...], parts: Sequence[torch.Tensor]) -> bool:
        """Whether only their modules hold them. A view of a buffer of all weights must not be moved."""
        if any(part.is_cuda for part in parts) and torch.cuda.is_current_stream_capturing():
            return False
        own = self.storages.get(paths)
        return all(
            type(part) in (torch.Tensor, nn.Parameter)
            and part.is_contiguous()
            and (own in (ANYWHERE, part.untyped_storage().data_ptr()) or _alone(part))
            for part in parts
        )


def _alone(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


class UnstackPatch:
    """Gives every weight of a block that lies in one storage with others its own again, when the block is restored."""

    def __init__(self, module: nn.Module, stacks: WeightStacks):
        self.module, self.stacks = module, stacks

    def apply(self) -> None:
        """Nothing yet: which weights belong together is known from the first call."""

    def check(self) -> None:
        """Nothing to conflict with: values and shapes are the user's own."""

    def undo(self) -> None:
        held = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for path in {path for paths in self.stacks.storages for path in paths} & held.keys():
            unshare(held[path])
