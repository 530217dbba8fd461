"""Which rows of a padded batch are computed, and where they stand one behind another."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from accel_kernels.sizes import power_of_two

from accel.errors import Unfit

SIXTEEN = 16  # steps between two powers of two, and the least step


class Packing(NamedTuple):
    """The tokens of B sequences of L tokens, without those of padding that nobody sees, one sequence behind another.

    In each come first the tokens that others attend to, then those of padding. starts: (sequences + 1,) int32; keys:
    (sequences,) int32, how many come first, None for all; longest: of these lengths, or more. size: T, with tokens that
    fill the call up. rows: (T,), which of the B * L rows each token is; None for all in order, and zeros behind them.
    places: (B * L,), which of the T each row is. unseen: (B * L, 1), the rows that are not computed, in whose place
    there are zeros; None for none.
    """

    starts: torch.Tensor
    keys: torch.Tensor | None
    longest: int
    size: int
    rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    unseen: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) -> (T, ...)."""
        flat = x.flatten(0, 1)
        if self.rows is not None:
            return flat[self.rows]
        more = self.size - len(flat)
        return F.pad(flat, (0, 0) * (flat.dim() - 1) + (0, more)) if more else flat

    def unpack(self, y: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """(T, ...) -> (batch, length, ...)."""
        y = y[: batch * length] if self.places is None else y[self.places]
        if self.unseen is not None:
            y = y.masked_fill_(self.unseen, 0.0)
        return y.unflatten(0, (batch, length))

    def for_graph(self) -> "Packing":
        """With as many sequences, and as long ones, as the graph that serves all up to there."""
        more = power_of_two(len(self.starts) - 1) + 1 - len(self.starts)
        starts = torch.cat([self.starts, self.starts[-1:].expand(more)])
        keys = None if self.keys is None else F.pad(self.keys, (0, more))
        return self._replace(starts=starts, keys=keys, longest=max(SIXTEEN, power_of_two(self.longest)))


def unpadded(x: torch.Tensor, size: int | None = None) -> Packing:
    """Of x, (B, L, C), without padding. size: of the packing, if more."""
    batch, length = x.shape[:2]
    return Packing(_steps(batch, length, x.device), None, length, size or batch * length)


def padded(x: torch.Tensor, mask: torch.Tensor, hidden: bool, windows: bool, places: bool) -> Packing:
    """Of x, (B, L, C), of which the mask, (B, L) bool, shows the tokens that others attend to.

    hidden: nobody sees rows of padding, where it is on the right. windows: attention goes by how far apart tokens stand
    in the packed order. places: the layers know where a token stands; without, rows of padding that are given the same
    are the same. Waits for the GPU. Raises Unfit for a sequence without tokens, which each attention of torch's treats
    in a way of its own, and with windows for padding that is not on the right.
    """
    batch, length = mask.shape
    counts = mask.sum(1)
    ordered = (mask[:, 1:] <= mask[:, :-1]).all()
    alike = ordered.new_zeros(()) if places or hidden else _alike(x, mask)
    facts = [counts.sum(), counts.min(), counts.max(), (counts < length).sum(), ordered, alike]
    total, least, most, short, ordered, alike = torch.stack(facts).tolist()  # waits for the GPU, once a call
    if not short:
        return unpadded(x, bucket(batch * length) if x.is_cuda else None)
    if not least:
        raise Unfit("a sequence that is all padding")
    if windows and not ordered:
        raise Unfit("padding that is not on the right, and attention by windows")
    if hidden and ordered:
        return _placed(mask, counts, torch.zeros_like(counts), total, most)._replace(unseen=~mask.view(-1, 1))
    if alike:
        return _placed(mask, counts, (counts < length).long(), total + short, min(most + 1, length))
    return _placed(mask, counts, length - counts, batch * length, length)


def _placed(mask: torch.Tensor, counts: torch.Tensor, more: torch.Tensor, total: int, longest: int) -> Packing:
    """more: (B,), how many tokens of padding are computed of each sequence: all, one for all, or none. total: tokens
    that are computed.
    """
    size = bucket(total)
    ends = (counts + more).cumsum(0)
    first = (ends - counts - more)[:, None]
    behind = torch.minimum((~mask).cumsum(1), more[:, None]) - 1
    places = torch.where(mask, first + mask.cumsum(1) - 1, first + counts[:, None] + behind)
    unseen = ~mask & (more == 0)[:, None]
    rows = torch.zeros(size + 1, dtype=torch.int64, device=mask.device)  # the last is for what is not computed
    rows.scatter_(0, places.masked_fill(unseen, size).flatten(), torch.arange(mask.numel(), device=mask.device))
    starts = torch.cat([ends.new_zeros(1), ends]).int()
    return Packing(starts, counts.int(), longest, size, rows[:size], places.masked_fill(unseen, 0).flatten())


def bucket(tokens: int) -> int:
    """As many tokens or a few more: one of sixteen numbers between two powers of two."""
    step = max(SIXTEEN, (1 << tokens.bit_length()) // (2 * SIXTEEN))
    return -(-tokens // step) * step


def _alike(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whether all rows of padding of each sequence are given the same."""
    first = (~mask).byte().argmax(1)
    one = x.gather(1, first[:, None, None].expand(-1, 1, x.shape[-1]))
    return ((x == one).all(-1) | mask).all()


def _steps(batch: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
