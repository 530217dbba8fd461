"""What a store knows of the forward before: how it was called, and a step launched ahead of its call."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from accel.cuda_graphs.entry import Replayed


class LatestForward(NamedTuple):
    """How the last forward was called; positions: of its last tokens, (..., 1 or rows, 1), None without any."""

    positions: torch.Tensor | None
    keep: int


@dataclass
class PendingStep:
    """A decode step launched ahead of its call. ids: all tokens; it takes the last. inputs: what generate() made."""

    ids: torch.Tensor
    length: int  # tokens stored before it
    keep: int
    step: Replayed | None
    done: torch.cuda.Event
    inputs: dict | None = None
    taken: bool = False

    def take(
        self, length: int, tokens: torch.Tensor, positions: torch.Tensor | None, mask: torch.Tensor | None, keep: int
    ) -> Replayed | None:
        """The step, if this forward is given the very tensors that generate() prepared for it; else None."""
        given, step, self.step = self.inputs, self.step, None
        if given is None or (length, keep) != (self.length, self.keep):
            return None
        places = given.get("position_ids")
        self.taken = (
            given.get("input_ids") is tokens
            and given.get("attention_mask") is mask
            and (places is None or places is positions)
        )
        return step if self.taken else None
