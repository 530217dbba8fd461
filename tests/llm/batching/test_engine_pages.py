"""What requests hold of the memory for keys and values, from the tables of a pool to what the kernels make of it."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accel_kernels import paged_attention
from accel_kernels.attention.paged.kv_quantization import restored, rounded
from accel_kernels.attention.paged.ragged import Ragged

import accel
from accel.llm.kv_cache.block_allocator import BlockAllocator
from accel.llm.kv_cache.layer_sets import layer_sets
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.kv_cache.shape import BLOCK, Shape
from support.llm.batching.engines import ROWS, alone, engine_of, finished, prompts_of, request, text
from support.llm.kv_cache.blocks import check_blocks
from support.llm.kv_cache.row_lists import CPU


@pytest.fixture
def llama(pair_of):
    return pair_of("llama")


def begun_alike(stock, count=4, shared=70):
    [prefix], rest = prompts_of([shared], 99, 5), prompts_of([9] * count, stock.config.vocab_size, 6)
    return [request(str(i), prefix + one, 6) for i, one in enumerate(rest)]


def stored_by(engine, requests):
    """Tokens that were computed for them."""
    counted = []
    launch = engine.steps.launch
    engine.steps.launch = lambda plan, *rest: (counted.append(int(plan.news.sum())), launch(plan, *rest))[1]
    finished(engine, requests)
    return sum(counted)


@pytest.mark.parametrize("share", [True, False])
def test_prompts_that_begin_alike_are_computed_once(llama, share):
    model, stock = llama
    asked = begun_alike(stock)
    count = stored_by(engine_of(model, share=share, tokens=512), asked)
    for one in asked:
        assert one.tokens == alone(stock, one.prompt, 6)
    assert count == 4 * (79 + 5) - (3 * BLOCK if share else 0)


def test_an_answer_is_found_by_who_goes_on_with_it(llama):
    model, stock = llama
    engine = engine_of(model, tokens=512)
    first = request("a", prompts_of([60], 99, 1)[0], 20)
    finished(engine, [first])
    second = request("b", first.prompt + first.tokens + [3, 4], 5)
    assert stored_by(engine, [second]) == 82 - BLOCK + 4
    assert second.tokens == alone(stock, second.prompt, 5)


@pytest.mark.parametrize("pages", [2, 3, 5])
def test_where_pages_run_out_who_came_last_waits(llama, pages):
    model, stock = llama
    asked = [request(str(i), p, 40) for i, p in enumerate(prompts_of([50, 30, 61, 10], 99, 2))]
    engine = engine_of(model, blocks=pages, tokens=512)
    finished(engine, asked)
    for one in asked:
        assert one.error is None and one.tokens == alone(stock, one.prompt, 40)
    assert engine.scheduler.preempted > 0 or pages != 3


def test_who_fills_all_pages_alone_fails_and_the_others_go_on(llama):
    model, stock = llama
    asked = [request("a", prompts_of([20], 99)[0], 100), request("b", prompts_of([30], 99)[0], 9)]
    finished(engine_of(model, blocks=1), asked)
    assert asked[0].error == "64 tokens fill all 1 blocks that there are" and len(asked[0].tokens) == 45
    assert asked[1].tokens == alone(stock, asked[1].prompt, 9)


@pytest.mark.parametrize(
    ("length", "new", "children", "limits"), [(70, 9, 2, {"tokens": 512}), (20, 3, 7, {"rows": 2})]
)
def test_several_answers_to_one_prompt_share_it(llama, length, new, children, limits):
    """Also where there are more of them than rows."""
    model, stock = llama
    parent = request("p", prompts_of([length], 99, 8)[0], new).with_children(children)
    found = finished(engine_of(model, **limits), [parent])
    assert {one.id for one in found} == {"p", *(f"p__child#{i}" for i in range(children))}
    wanted = alone(stock, parent.prompt, new)
    assert all(one.tokens == wanted for one in found)


def test_windows_give_pages_back(pair):
    """Of a model all whose layers have one."""
    model, stock = pair("mistral", sliding_window=20)
    engine = engine_of(model, tokens=512, rows=2, context=512)
    one = request("a", prompts_of([90], 99)[0], 36)
    engine.add(one)
    held = []
    while engine.busy:
        engine.step()
        held.append(engine.allocator.blocks - 1 - engine.allocator.free)
    assert one.tokens == alone(stock, one.prompt, 36)
    assert max(held[2:]) <= 2 and engine.allocator.sets[0].window == 20


@pytest.mark.parametrize("tokens", [7, 512])
def test_windows_that_pass_the_end_of_a_page(tokens, pair):
    """The step whose tokens see the last keys of a page still reads them, beside others that write."""
    model, stock = pair("mistral", sliding_window=5)
    engine = engine_of(model, tokens=tokens, rows=6, context=512)
    prompts = prompts_of([60, 63, 64, 65, 150, 200], 99)
    requests = [request(str(number), prompt, 12) for number, prompt in enumerate(prompts)]
    finished(engine, requests)
    assert [one.tokens for one in requests] == [alone(stock, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_keys_and_values(kind, pair):
    """As the same model rounds them for one request."""
    model, _ = pair("llama")
    accel.restore(model)
    accel.optimize(model, kv_cache=kind, cpu="fuse")
    asked = [request(str(i), p, 8) for i, p in enumerate(prompts_of([5, 70, 33], 99, 4))]
    finished(engine_of(model, tokens=512), asked)
    for one in asked:
        assert one.tokens == alone(model, one.prompt, 8)


def test_nothing_that_was_stored_with_other_weights_is_found(pair):
    model, stock = pair("llama")
    engine = engine_of(model, tokens=512)
    one = request("a", prompts_of([100], 99)[0], 4)
    finished(engine, [one])
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            ours.mul_(1.5), theirs.mul_(1.5)
    again = dataclasses.replace(one, id="b", tokens=[])
    finished(engine, [again])
    assert again.tokens == alone(stock, one.prompt, 4)


def test_after_a_pause_nothing_is_found_that_was_stored_before(pair_of):
    """Not every edit of weights can be noticed."""
    model, stock = pair_of("llama")
    engine = engine_of(model, tokens=512)
    asked = [request(str(number), prompts_of([100], 99)[0], 4) for number in range(2)]
    finished(engine, asked[:1])
    engine.resumed()
    assert stored_by(engine, asked[1:]) == 103 and asked[1].tokens == alone(stock, asked[1].prompt, 4)


def test_the_model_is_looked_at_now_and_then(pair_of, monkeypatch):
    model, _ = pair_of("llama")
    engine = engine_of(model)
    looks = []
    monkeypatch.setattr(engine, "changed", lambda: looks.append(1))
    finished(engine, [request("a", [1, 2], 40)])
    assert len(looks) == 3
    finished(engine, [request("b", [1, 2], 2)])
    assert len(looks) == 4


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
        self.pages = PagedKVCache(shapes, self.sets, PAGES, ROWS, COLUMNS)
        self.pool = BlockAllocator(self.sets, PAGES, ROWS, COLUMNS, share=True)
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
        check_blocks(self.pool)
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
