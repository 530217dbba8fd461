"""Where each element that ranks exchange is read, and where it is written."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from accel_kernels.collective.exchange import Layout


class Axis(NamedTuple):
    """Elements next in sending order: every `unit`-th along `dim` of the source, at stride `target` in the result."""

    size: int
    dim: int
    unit: int
    target: int


class Pieces(NamedTuple):
    """An exchange of a tensor of `shape`, (ranks, ...): piece r goes to rank r.

    target: the dense shape of the result. ranks: the axis of ranks. inside: the axes of a piece, from the outermost in
    sending order.
    """

    shape: tuple[int, ...]
    target: tuple[int, ...]
    ranks: Axis
    inside: tuple[Axis, ...]

    @property
    def numel(self) -> int:
        """Numbers of a piece."""
        return torch.Size(self.shape).numel() // self.ranks.size

    def layout(self, strides: tuple[int, ...]) -> Layout:
        """strides: of what is sent."""
        return _layout(self, strides)


def sent_pieces(shape: tuple[int, ...], view: tuple[int, ...], strides: tuple[int, ...]) -> Pieces | None:
    """The pieces of an exchange of this shape, (ranks, ...), whose result is viewed in another way and copied densely.

    view, strides: of the result, in sending order. None for a view that omits or repeats elements, or cuts pieces
    otherwise than their dimensions do.
    """
    total, dense = torch.Size(shape).numel(), _dense(view)
    sent = [
        _Dim(size, unit, dim) for dim, (size, unit) in enumerate(zip(shape, _dense(shape), strict=True)) if size > 1
    ]
    seen = [_Dim(size, unit, dim) for dim, (size, unit) in enumerate(zip(view, strides, strict=True)) if size > 1]
    seen.sort(key=lambda one: -one.unit)
    if not total or not _covers(seen, total) or not sent or sent[0].dim:
        return None
    found = []
    for high, low in pairwise(sorted({end for one in (*sent, *seen) for end in (one.unit, one.end)}, reverse=True)):
        a, b = (next((one for one in dims if one.unit <= low and high <= one.end), None) for dims in (sent, seen))
        if a is None or b is None or high % low or low % a.unit or low % b.unit:
            return None
        found.append(Axis(high // low, a.dim, low // a.unit, dense[b.dim] * (low // b.unit)))
    first, *inside = found
    if first.size != shape[0] or first.dim or any(one.dim == 0 for one in inside):
        return None
    return Pieces(tuple(shape), tuple(view), first, tuple(inside))


class _Dim(NamedTuple):
    size: int
    unit: int
    dim: int

    @property
    def end(self) -> int:
        return self.size * self.unit


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of this shape without gaps."""
    found = [1]
    for size in reversed(shape[1:]):
        found.append(found[-1] * size)
    return tuple(reversed(found))


def _covers(dims: list[_Dim], total: int) -> bool:
    """Whether these, from the largest stride on, reach each of `total` numbers once."""
    ends = [one.end for one in dims]
    return [*ends, 1] == [total, *(one.unit for one in dims)]


@lru_cache(maxsize=256)
def _layout(pieces: Pieces, strides: tuple[int, ...]) -> Layout:
    """As few dimensions as there may be, from the largest stride of what is sent on."""
    dims = [[one.size, strides[one.dim] * one.unit, one.target] for one in pieces.inside if one.size > 1]
    dims.sort(key=lambda one: (-one[1], -one[2]))
    merged = dims[:1] or [[1, 1, 1]]
    for size, source, target in dims[1:]:
        last = merged[-1]
        if last[1] == size * source and last[2] == size * target:
            merged[-1] = [last[0] * size, source, target]
        else:
            merged.append([size, source, target])
    sizes, sources, targets = (tuple(column) for column in zip(*merged, strict=True))
    first = pieces.ranks
    return Layout(sizes, sources, targets, strides[first.dim] * first.unit, first.target)
