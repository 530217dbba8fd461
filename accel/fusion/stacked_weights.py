"""Weights of several linears in one storage, each a view of its rows: one product serves all, and nothing is copied."""

from collections.abc import Sequence

import torch
from torch import nn

from accel.patching.patch import set_data
from accel.quantization.module import in_rows


class Stacked:
    """Puts the weights of several linears into one storage, each a view of its rows, so that one GEMM serves all.

    No new parameters, no second copy: `stacked_rows` finds the whole again from the parts. Undo gives each its own
    storage.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self.linears = linears  # as given: whoever made the list may still add to it before the patch is applied

    def apply(self) -> None:
        if len({type(linear) for linear in self.linears}) == 1:
            for parts in zip(*map(in_rows, self.linears), strict=True):
                stack_rows(parts)

    def check(self) -> None:
        """Nothing to conflict with: values and shapes are the user's own."""

    def undo(self) -> None:
        for linear in self.linears:
            for tensor in in_rows(linear):
                if tensor is not None and tensor.untyped_storage().nbytes() != tensor.nbytes:
                    set_data(tensor, torch.clone)


def stacked_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose consecutive rows the parts are, or None where they do not lie one after the other."""
    first = parts[0]
    place = first.data_ptr()
    for part in parts:
        if part.data_ptr() != place or part.dtype != first.dtype or not part.is_contiguous():
            return None
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += part.nbytes
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def stack_rows(parts: Sequence[torch.Tensor | None]) -> None:
    """Moves the parts into one storage, in place; does nothing where one is missing, or they do not match."""
    held = [part for part in parts if part is not None and not part.is_meta]
    if len(held) < len(parts) or stacked_rows(held) is not None:
        return
    if any(part.is_inference() for part in held):  # their place in memory cannot be changed
        return
    if len({id(part) for part in held}) != len(held):  # tied weights cannot be two rows of one storage
        return
    if len({(part.dtype, part.device, part.shape[1:]) for part in held}) != 1:
        return
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in held])
        for part, rows in zip(held, whole.split([part.shape[0] for part in held]), strict=True):
            part.data = rows
