"""The sum that all layers share, where it is wider than what they compute in: Mamba keeps it in float32."""

from typing import Any, NamedTuple

import torch
from torch import nn

from accel.llm.parts.norm import NormSpec
from accel.llm.parts.part import BoundNorm
from accel.llm.recording.record import NotUnderstood, Value
from accel.patching.fast_forward import Kernels


class Widths(NamedTuple):
    """The dtypes of what a layer adds first and of the sum that it gives, as seen in a run."""

    branch: torch.dtype
    total: torch.dtype

    @property
    def wide(self) -> bool:
        return self.total.itemsize > self.branch.itemsize


def rounded(value: Value, x: Value) -> bool:
    """Whether it is x in another dtype."""
    other, held = value.held, x.held
    return other.dtype != held.dtype and other.shape == held.shape and torch.equal(other, held.to(other.dtype))


def narrowed_to(widths: Widths, layer: nn.Module, norm: NormSpec | None, alone: bool) -> torch.dtype | None:
    """In which dtype a layer computes now, of whose sum that is another; None where all is one.

    alone: it adds one branch. Raises NotUnderstood where that cannot be told from what was seen.
    """
    weight = None if norm is None else next(layer.get_submodule(norm.name).parameters(), None)
    if widths.wide and (weight is None or not alone):
        raise NotUnderstood("its sum is wider than what it adds, in a way of its own")
    if not alone or weight is None:
        return None
    if not widths.wide and widths.total.itemsize > weight.dtype.itemsize:
        raise NotUnderstood(f"it was looked at in {str(widths.total)[6:]}: its sum may be wider than its weights are")
    return weight.dtype if widths.wide else None


def reads_wide(kernels: Kernels, norm: BoundNorm | None, mixer: Any) -> bool:
    """Whether the products that read the sum of one token round it themselves."""
    normed = norm is not None and norm.norm is not None and mixer is not None
    return normed and all(projection.takes_wide(kernels) for projection in mixer.projections)
