"""How projections' outputs hold queries, keys and values, by heads; which columns of a tensor are another's."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import torch

from accel.llm.recording.record import Call, LayerRecord

# How the outputs of the projections hold heads: three projections; one, queries before keys before values; one, in
# groups of some queries, their key, their value (one query a group in GPT-NeoX and Bloom); or "qvk 4", as CodeGen: one,
# in 4 groups of queries, as many values, as many keys. Or two projections: of queries, and of keys that are values too,
# before the norms of both.
SEPARATE, JOINED, GROUPED, KEYS = "separate", "joined", "grouped", "keys"
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def split(
    outputs: Sequence[torch.Tensor], layout: str, heads: int, groups: int, kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of the projections, (rows, new, N), as queries, keys and values, (rows, new, heads, D)."""
    if layout == KEYS:
        q, k = (y.unflatten(-1, (-1, dim)) for y in outputs)
        v = k
    elif layout == SEPARATE:
        q, k, v = (y.unflatten(-1, (-1, dim)) for y in outputs)
    elif layout == JOINED:
        q, k, v = outputs[0].unflatten(-1, (-1, dim)).split([heads, groups, groups], dim=-2)
    elif layout == GROUPED:
        y = outputs[0].unflatten(-1, (groups, -1, dim))
        q, k, v = y[..., :-2, :].flatten(-3, -2), y[..., -2, :], y[..., -1, :]
    else:
        order, shards = layout.split()
        parts = outputs[0].unflatten(-1, (int(shards), 3, -1, dim)).unbind(-3)
        q, k, v = (parts[order.index(name)].flatten(-3, -2) for name in "qkv")
    if groups != kv_heads:
        k, v = (t.repeat_interleave(kv_heads // groups, dim=-2) for t in (k, v))
    return q, k, v


def projections_of(calls: list[Call], layer: LayerRecord) -> Iterator[tuple[tuple[Call, ...], dict]]:
    """Calls whose outputs may hold queries, keys and values, and the arguments of `split` for them."""
    rows, stored, tokens, d = layer.cached.values.shape
    values = layer.cached.values.transpose(1, 2)  # (rows, tokens, heads, D)

    def flat(call: Call) -> bool:
        return call.alone and call.made is not None and call.output.held.shape[:2] == (rows, tokens)

    def layout(kind: str, heads: int, groups: int) -> dict[str, Any]:
        return {"layout": kind, "heads": heads, "groups": groups, "kv_heads": stored, "dim": d}

    whole = [call for call in calls if flat(call) and call.output.held.dim() == 3]
    for at, call in enumerate(whole):
        y = call.output.held
        if any(torch.equal(y, c.output.held) and c.input.same(call.input) for c in whole[at + 1 :]):
            continue  # keys of the same weights as values, which come behind them
        total, rest = divmod(y.shape[-1], d)
        if rest:
            continue
        if total == stored and torch.equal(y.unflatten(-1, (-1, d)), values):
            siblings = [c for c in whole if c is not call and c.input.same(call.input)]
            for k in (c for c in siblings if c.output.held.shape[-1] == stored * d):
                for q in (c for c in siblings if c is not k and c.output.held.shape[-1] % (stored * d) == 0):
                    yield (q, k, call), layout(SEPARATE, q.output.held.shape[-1] // d, stored)
            for q in (c for c in siblings if c.output.held.shape[-1] % (stored * d) == 0):
                yield (q, call), layout(KEYS, q.output.held.shape[-1] // d, stored)
        if total > 2 * stored and torch.equal(y[..., -stored * d :].unflatten(-1, (-1, d)), values):
            yield (call,), layout(JOINED, total - 2 * stored, stored)
        for groups in (g for g in range(1, total // 3 + 1) if total % g == 0 and stored % g == 0):
            mine = y.unflatten(-1, (groups, -1, d))[..., -1, :]
            if torch.equal(mine.repeat_interleave(stored // groups, dim=-2), values):
                yield (call,), layout(GROUPED, total - 2 * groups, groups)
        for shards in (s for s in range(1, stored + 1) if total == 3 * stored and stored % s == 0):
            parts = y.unflatten(-1, (shards, 3, -1, d)).unbind(-3)
            for order in map("".join, permutations("qkv")):
                if torch.equal(parts[order.index("v")].flatten(-3, -2), values):
                    yield (call,), layout(f"{order} {shards}", stored, stored)


class HeadColumns(NamedTuple):
    """The column of head h, repeat r, channel c is first + h * head + r * repeat + c. sizes: of these three."""

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
    """Which column of `whole` each of `part` is to the bit, (columns,), by the last tokens; None where one is none."""
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
