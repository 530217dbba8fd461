"""Which columns of one tensor are those of another: how outputs of projections are cut, seen in their numbers."""

from typing import NamedTuple

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class HeadColumns(NamedTuple):
    """Heads among columns: that of head h, repeat r and channel c is first + h * head + r * repeat + c.

    sizes: (heads, repeats, channels).
    """

    first: int
    head: int
    repeat: int
    sizes: tuple[int, int, int]

    def of(self, joint: torch.Tensor) -> torch.Tensor:
        """These of (rows, tokens, columns), without a copy: (rows, tokens, heads, repeats, channels)."""
        *outer, last = joint.stride()
        place = joint.storage_offset() + self.first * last
        strides = (*outer, self.head * last, self.repeat * last, last)
        return joint.as_strided((*joint.shape[:2], *self.sizes), strides, place)


def places(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """Of each column of `part` which one of `whole` it is to the bit, (columns,); None where one is none.

    Both (rows, tokens, columns). Where `part` has fewer tokens, the last ones are compared.
    """
    whole = whole[:, whole.shape[1] - part.shape[1] :]
    kind = BITS[part.element_size()]
    mine, all_columns = (t.flatten(0, 1).contiguous().view(kind).cpu().long() for t in (part, whole))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, (mine.shape[0], 1), generator=generator, device="cpu") | 1
    sums, order = (all_columns * weights).sum(0).sort()  # numbers that only equal columns share, but by chance
    found = order[torch.searchsorted(sums, (mine * weights).sum(0)).clamp_max(len(order) - 1)]
    return found if torch.equal(all_columns[:, found], mine) else None


def strided(index: torch.Tensor) -> HeadColumns | None:
    """index: (heads, repeats, channels). None where the columns are not evenly spaced."""
    first = int(index[0, 0, 0])
    head, repeat = (int(index.select(dim, 1)[0, 0]) - first if index.shape[dim] > 1 else 0 for dim in (0, 1))
    sizes = (index.shape[0], index.shape[1], index.shape[2])
    heads, repeats, channels = (torch.arange(size, device="cpu") for size in sizes)
    even = first + heads[:, None, None] * head + repeats[:, None] * repeat + channels
    return HeadColumns(first, head, repeat, sizes) if torch.equal(index, even) else None
