"""Steps of several requests, from the tables of a BlockPool and the pages of a PagePool to what the kernels make of it.

Every page that nobody has is NaN (or the lowest code): what a kernel reads beyond a row's own tokens would show.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accel_kernels import paged_attention
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.attention.paged.ragged import Ragged

from accel.llm.kv_cache.block_pool import BlockPool
from accel.llm.kv_cache.blocks import BLOCK, Shape
from accel.llm.kv_cache.layer_sets import layer_sets
from accel.llm.kv_cache.pages import PagePool
from support.llm.batching.texts import ROWS, text
from support.llm.kv_cache.row_lists import CPU

KV_HEADS, DIM, COLUMNS, PAGES = 1, 16, 3, 12
WINDOWS = (5, None)
POISON = {torch.float32: torch.nan, torch.int8: -128}


class Steps:
    """Two layers, one with a window. What a token stores follows from itself and its place."""

    def __init__(self, codes):
        self.codes = codes
        shapes = [Shape(KV_HEADS, DIM, torch.float32, CPU, codes)] * 2
        self.sets = layer_sets(shapes, WINDOWS)
        assert len(self.sets) == 2
        self.pages = PagePool(shapes, self.sets, PAGES, ROWS, COLUMNS, CPU)
        self.pool = BlockPool(self.sets, PAGES, ROWS, COLUMNS, share=True)
        self.of_token, self.of_place = torch.randn(3, 10, KV_HEADS, DIM), torch.randn(COLUMNS * BLOCK, KV_HEADS, DIM)
        self.stored: dict[int, list[int]] = {}
        self.poison()

    def poison(self):
        """Pages that nobody holds and nobody can find."""
        for kept in self.pages.kept:
            kept[:, :, self.pool.unused] = POISON[kept.dtype]

    def of(self, tokens, start=0):
        """Queries, keys and values of tokens from a place on, (1, tokens, heads, DIM) each."""
        place = self.of_place[start : start + len(tokens)]
        q, k, v = (some[torch.tensor(tokens)] + place for some in self.of_token)
        return torch.cat([q, -q], 1)[None], k[None], v[None]

    def open(self, row, tokens) -> int:
        there = self.pool.open(row, tokens)
        self.stored[row] = list(tokens[:there])
        return there

    def step(self, new: dict[int, list[int]]):
        """One call a layer: rows with one new token first, then prompts; a token of nobody's at the end."""
        rows = sorted(new, key=lambda row: len(new[row]) > 1)
        lengths = [len(self.stored[row]) for row in rows]
        ends = np.array([length + len(new[row]) for row, length in zip(rows, lengths, strict=True)])
        assert self.pool.extend_all(np.array(rows), ends) == len(rows)
        self.pages.upload(*self.pool.changes())
        decodes = sum(len(new[row]) == 1 for row in rows)
        numbers = [number for number, row in enumerate(rows) for _ in new[row]]
        starts = np.cumsum([0, *(len(new[row]) for row in rows)]).tolist()
        tensors = [starts, lengths, rows, [*numbers, -1], [decodes, len(rows)]]
        ragged = Ragged(*(torch.tensor(t, dtype=torch.int32) for t in tensors), decodes, len(rows) - decodes)
        parts = [self.of(new[row], length) for row, length in zip(rows, lengths, strict=True)]
        q, k, v = (
            torch.cat([*several, torch.zeros_like(several[0][:, :1])], 1) for several in zip(*parts, strict=True)
        )
        for row in rows:
            self.stored[row] += new[row]
        for layer, window in enumerate(WINDOWS):
            kv = self.pages.kv(layer)._replace(ragged=ragged)
            # Triton's interpreter is slow: exact numbers and long prompts are tried with the kernels themselves.
            slow = self.codes is None or q.shape[1] >= 20
            attention = paged_attention.reference if slow else paged_attention.triton
            out = attention(q.clone(), k.clone(), v.clone(), kv, 0.5, window=window)
            for row, length, start in zip(rows, lengths, starts, strict=False):
                wanted = self.plain(self.stored[row], length, window)
                torch.testing.assert_close(out[:, start : start + len(new[row])], wanted, rtol=1e-5, atol=1e-5)
            assert not out[:, starts[-1] :].any()
        for row in rows:
            self.pool.commit(row, self.stored[row])
        self.pool.slide_all(np.array(rows), ends)
        self.pool.check()
        self.poison()

    def plain(self, tokens, start, window):
        """Attention of the tokens from `start` on over keys and values that lie in a row."""
        q, k, v = self.of(tokens)
        if self.codes is not None:
            k, v = (restored(*rounded(t, self.codes), torch.float32) for t in (k, v))
        at = torch.arange(len(tokens))
        seen = at <= at[:, None] if window is None else (at <= at[:, None]) & (at > at[:, None] - window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.5, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)[:, start:]

    def close(self, row):
        self.pool.close(row)
        del self.stored[row]
        self.poison()

    def fork(self, row, other):
        self.pages.copy(self.pool.fork(row, other, len(self.stored[row])))
        self.stored[other] = list(self.stored[row])


@pytest.mark.parametrize("codes", [None, torch.int8], ids=str)
def test_requests_that_come_share_fork_and_end_read_what_is_theirs(codes):
    torch.manual_seed(0)
    steps = Steps(codes)
    assert steps.open(0, text([1], 3)) == steps.open(1, [4, 5]) == 0
    steps.step({0: text([1], 3), 1: [4, 5]})
    steps.step({0: [8], 1: [9]})
    assert steps.open(2, text([1], 9)) == BLOCK
    steps.step({0: [8], 2: [7] * 4})
    steps.fork(0, 3)  # in the middle of a block
    steps.step({0: [1], 3: [2], 2: [7, 7], 1: [1]})
    assert steps.pool.table[:, [0, 2, 3], 0].any(1).tolist() == [False, True]  # the window has passed the block
    steps.close(0)
    steps.step({3: [4], 2: [5] * 3})
    steps.close(2)
    steps.close(1)
    assert steps.open(0, text([1], 1)) == BLOCK
    steps.step({3: [6], 0: [7]})
    steps.close(3)
    steps.close(0)
    assert steps.pool.free == PAGES - 1
