"""Attention of packed sequences, against a formula over all pairs of tokens, and what its kernel leaves to torch."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accel_kernels import packed_attention
from accel_kernels.device import replayed

from support.kernels.cards import made_up

SMALL = [case for case in packed_attention.cases if case.small]


def dense(
    q, k, v, starts, scale, *, longest, window=None, bias=None, causal=False, slopes=None, keys=None, padding=None,
    by_query=None, by_key=None, places=None,
):  # fmt: skip
    """Of all pairs at once, those of two sequences hidden."""
    at = torch.arange(len(q))
    sequence = torch.searchsorted(starts[1:].long(), at, right=True)
    group = q.shape[1] // k.shape[1]
    k, v = (t.nan_to_num(0, 0, 0).repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.nan_to_num(0, 0, 0), k) * scale
    behind = at - at[:, None]
    if bias is not None:
        reach = bias.shape[1] // 2
        scores = scores + bias[:, behind.clamp(-reach, reach) + reach]
    if places is not None:
        column = places[behind.clamp(-(len(places) // 2), len(places) // 2) + len(places) // 2].long()
        mine, theirs = (
            t.transpose(0, 1).gather(2, place.expand(q.shape[1], -1, -1))
            for t, place in ((by_query, column), (by_key, column.t()))
        )
        scores = scores + scale * (mine + theirs.transpose(1, 2))
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * behind.abs()
    seen = sequence == sequence[:, None]
    if window is not None:
        seen &= (behind >= -window[0]) & (behind <= window[1])
    if causal:
        seen &= behind <= 0
    if keys is not None:
        ends = (starts[:-1] + keys)[sequence.clamp_max(len(keys) - 1)]
        if padding is not None:  # a row behind them stands for as many
            behind = (at >= ends)[:, None]
            alone = behind & (at[:, None] == at) & (padding[sequence.clamp_max(len(keys) - 1)] > 0)
            scores = torch.where(alone, padding[sequence.clamp_max(len(keys) - 1)].log(), scores.where(~behind, 0.0))
        seen &= (at < ends) | (False if padding is None else alone)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)  # of who sees none
    out = torch.einsum("hij,jhd->ihd", weights, v)
    return out.flatten(1).masked_fill((at >= starts[-1])[:, None], 0.0)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_reference_is_attention_inside_each_sequence(case):
    args, more = case.make(torch.device("cpu"), torch.float64)
    torch.testing.assert_close(packed_attention.reference(*args, **more), dense(*args, **more))


def test_what_the_kernel_leaves_to_torch():
    (q, k, v, starts, scale), more = SMALL[0].make(torch.device("cpu"), torch.float16)

    def reason(q=q, k=k, v=v, starts=starts, scale=scale, **others):
        return packed_attention.supports(q, k, v, starts, scale, **more | others) or ""

    assert not reason()
    assert "int32" in reason(starts=starts.long()) and "positive" in reason(scale=-1.0)
    assert "heads" in reason(q=q[:, :3]) and "bias" in reason(bias=torch.zeros(4, 8))
    assert "next to each other" in reason(q=torch.cat((q, q), -1)[..., ::2]) and "dtypes" in reason(v=v.float())
    assert "window" in reason(window=(-1, 3)) and "slopes" in reason(slopes=torch.zeros(2))
    assert "2^31" in reason(longest=2**30) and "empty" in reason(starts=starts[:1])


MIXED = 16292, 64, 500  # tokens, sequences, the longest
MEASURED = {
    "bge-base": (MIXED, 12, 64), "bge-m3": (MIXED, 16, 64), "minilm": (MIXED, 12, 32), "modernbert": (MIXED, 12, 64),
    "mpnet": (MIXED, 12, 64), "qwen3-embedding": (MIXED, 16, 128), "siglip": ((23328, 32, 729), 16, 72),
    "clip-l": ((18464, 32, 577), 16, 64), "qwen-tower": ((7680, 4, 4096), 16, 80),
}  # fmt: skip


def test_the_tile_is_what_was_measured_to_be_the_fastest():
    """Or no more than five hundredths slower, on an H100."""
    kernels = pytest.importorskip("accel_kernels.attention.packed.packed_attention_triton")
    found = Path(__file__).parents[3] / "benchmarks" / "results" / "nvidia-h100-packed-attention.json"
    rows = json.loads(found.read_text())["rows"]
    for name, (sizes, heads, dim) in MEASURED.items():
        tiles = {tuple(row["tile"]): row["us"] for row in rows if row["shape"] == name and "tile" in row}
        q, channels = OnGPU((sizes[0], heads, dim)), sum(kernels.channels_of(dim, True))
        with replayed(made_up(90)):
            tile = kernels.packed_tile(q, channels, name == "mpnet", *sizes)
        assert tiles[tile] <= 1.05 * min(tiles.values()), (name, tile)


class OnGPU(NamedTuple):
    """What is asked of queries."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda", 0)
