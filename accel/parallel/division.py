"""How a tensor in files is divided among ranks: along which dimension, and what each rank holds of it."""

from typing import Any, NamedTuple

import torch

Span = tuple[int, int]  # first, and one past the last


class Division(NamedTuple):
    """How a tensor is divided along one dimension: by rank, the spans of it that the rank holds, one behind another."""

    dim: int
    spans: tuple[tuple[Span, ...], ...]


class Described(NamedTuple):
    """A tensor in a file. shape: of all of it; dtype: of torch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def taken(tensor: torch.Tensor, division: Division | None, rank: int) -> torch.Tensor:
    """The rank's part of a whole tensor, or of what safetensors gives for one in a file."""
    if division is None:
        return tensor[...]

    def rows(start: int, stop: int) -> torch.Tensor:
        index = (slice(None),) * division.dim + (slice(start, stop),)
        return tensor[index]

    parts = [rows(*span) for span in division.spans[rank]] or [rows(0, 0)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, division.dim)


def spans_of(index: Any, shape: tuple[int, ...]) -> tuple[Span, ...]:
    """What an index of slices, or of an ellipsis, takes of every dimension."""
    index = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    found = []
    for size, one in zip(shape, slices, strict=True):
        start, stop, step = one.indices(size)
        if step != 1:
            raise ValueError(f"every {step}th of a tensor's rows is asked for")
        found.append((start, max(start, stop)))
    return tuple(found)
