"""Which rows of a padded batch are computed, and where these stand one behind another."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from accel_kernels.device import Feature, lacks
from accel_kernels.op import dtype_reason, make_op, random_cases

NONE, ONE, ALL = range(3)  # of the rows of padding of a sequence


class PackedRows(NamedTuple):
    """Rows of B sequences of L, one sequence behind another: first those that others attend to, then those of padding.

    facts: (7,) int64, how many rows are computed in all; of the longest sequence; the least number of tokens of one;
    how many sequences have padding; whether it is behind the tokens of all, or before those of all; and how much of it
    is computed: NONE, ONE row for all that are alike, or ALL. starts: (sequences + 1,) int32; keys, padding:
    (sequences,) int32, how many rows of each are tokens, and how many are not. rows: (size,) int64, which of the B * L
    each is, with zeros behind them. places: (B * L,) int64, where each is; unseen: (B * L, 1) bool, the ones that are
    not computed, whose places are 0.
    """

    facts: torch.Tensor
    starts: torch.Tensor
    keys: torch.Tensor
    padding: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    unseen: torch.Tensor


def reference(mask, x=None, plain=None, *, size, idle=0, hidden=False, placed=False, turns=False):
    """mask: (B, L) bool, contiguous, the tokens that others attend to. Gives `PackedRows`.

    x: (B, L, C), by which rows of padding are told apart; without it all differ. hidden: nobody sees those behind a
    sequence, where `plain`, () bool, says so too: none is computed. placed: those that are alike differ still, by where
    they stand. turns: a sequence stands from its last token to its first where padding is not behind all, so that it
    comes last. size: at least B * L. idle: sequences without rows behind the others. The reference waits for the GPU.
    """
    batch, length = mask.shape
    counts = mask.sum(1)
    short = counts < length
    ordered = not (mask[:, 1:] & ~mask[:, :-1]).any()
    mirrored = not (mask[:, :-1] & ~mask[:, 1:]).any()
    turned = turns and not ordered
    alike = x is not None and _alike(x, mask)
    computed = ONE if alike and (turned or not placed) else ALL
    if hidden and ordered and (plain is None or plain):
        computed = NONE
    more = (torch.zeros_like(counts), short.long(), length - counts)[computed]
    starts = F.pad(counts + more, (1, idle)).cumsum(0)
    seen = mask.flip(1) if turned else mask
    behind = torch.minimum((~seen).cumsum(1), more[:, None]) - 1
    first = starts[:batch, None]
    places = torch.where(seen, first + seen.cumsum(1) - 1, first + counts[:, None] + behind)
    places = (places.flip(1) if turned else places).flatten()
    unseen = (~mask & (more == 0)[:, None]).flatten()
    rows = torch.zeros(size + 1, dtype=torch.int64, device=mask.device)  # the last is for what is not computed
    last = torch.where(mask.flatten() | unseen, places.new_full((), size), places)
    every = torch.arange(mask.numel(), device=mask.device)
    rows.scatter_(0, last, every)  # of those that share a place any one
    rows.scatter_(0, torch.where(mask.flatten(), places, size), every)
    most = (counts + more).max()
    told = ordered, mirrored, computed
    facts = [starts[-1], most, counts.min(), short.sum(), *map(torch.tensor, told)]
    return PackedRows(
        torch.stack([one.to(mask.device, torch.int64) for one in facts]),
        starts.int(),
        F.pad(counts, (0, idle)).int(),
        F.pad(length - counts, (0, idle)).int(),
        rows[:size],
        places.masked_fill(unseen, 0),
        unseen[:, None],
    )


def _alike(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether all rows of padding of each sequence are given the same."""
    first = (~mask).byte().argmax(1)
    one = x.gather(1, first[:, None, None].expand(-1, 1, x.shape[-1]))
    return bool(((x == one).all(-1) | mask).all())


def supports(mask, x=None, plain=None, *, size, idle=0, hidden=False, placed=False, turns=False) -> str | None:
    if mask.numel() == 0:
        return "empty"
    if mask.dtype != torch.bool or not mask.is_contiguous():
        return f"a mask of {mask.dtype}, or not contiguous"
    if mask.numel() >= 2**31:
        return "more than 2^31 rows"
    if x is not None and (x.shape[:2] != mask.shape or x.stride(2) != 1 or x.device != mask.device):
        return f"rows {tuple(x.shape)} beside a mask {tuple(mask.shape)}, or channels not next to each other"
    if x is not None:
        return dtype_reason(x)
    return lacks(mask.device, Feature.TRITON) if mask.is_cuda else None


@random_cases
def _case(rand, lengths, length, channels=0, *, left=False, holes=False, alike=False, more=5, **given):
    """left: padding is before the tokens. more: rows beyond B * L."""
    at = torch.arange(length, device=rand.device)
    mask = at < torch.tensor(lengths, device=rand.device)[:, None]
    mask = mask.flip(1) if left else mask
    mask = mask & (at % 3 > 0) if holes else mask
    x = rand(len(lengths), length, channels)
    if alike:
        x = torch.where(mask[..., None], x, rand(channels))
    return (mask, x if channels else None), {"size": mask.numel() + more} | given


MIXED = [10 + 490 * (i * 37 % 64) // 63 for i in range(64)]
CASES = (
    _case("all", [7, 1, 20], 20, idle=1, small=True),
    _case("hidden", [7, 1, 20], 20, idle=1, hidden=True, small=True),
    _case("alike", [7, 1, 20, 3], 20, 24, alike=True, small=True),
    _case("alike-placed", [7, 1, 20, 3], 20, 24, alike=True, placed=True, small=True),
    _case("unlike", [7, 530], 530, 300, small=True),
    _case("left", [7, 1, 20], 20, 8, alike=True, left=True, hidden=True, small=True),
    _case("turned", [7, 1, 600], 600, 8, alike=True, left=True, placed=True, turns=True, small=True),
    _case("holes", [7, 5, 20], 20, idle=1, holes=True, hidden=True, small=True),
    _case("empty", [0, 2], 3, small=True),
    _case("many", [2, 1, 3] * 90, 3, more=2000, small=True),
    _case("bert", MIXED, 500, 768, alike=True),
)

packed_rows = make_op("packed_rows", reference, supports, CASES)
