"""What requests hold of the memory for keys and values. What nobody holds is NaN after every step."""

import dataclasses

import pytest
import torch

import accel
from accel.llm.kv_cache import block_allocator
from accel.llm.kv_cache.shape import BLOCK
from support.llm.batching.engines import as_alone, engine_of, finished, request, requests


def stored_by(engine, requests):
    """Tokens that were computed for them."""
    counted = []
    launch = engine.steps.launch
    engine.steps.launch = lambda plan, *rest: (counted.append(int(plan.query_lengths.sum())), launch(plan, *rest))[1]
    finished(engine, requests)
    return sum(counted)


@pytest.mark.parametrize("share", [True, False])
def test_prompts_that_begin_alike_are_computed_once(llama, share):
    """So is an answer, for who goes on with it. After a pause nothing is found: not every edit can be noticed."""
    model, stock = llama
    asked, engine = requests((79,) * 4, 6, 6), engine_of(model, share=share, tokens=512)
    asked = [dataclasses.replace(one, prompt=asked[0].prompt[:70] + one.prompt[70:], tokens=[]) for one in asked]
    assert stored_by(engine, asked) == 4 * (79 + 5) - (3 * BLOCK if share else 0)
    behind = request("b", asked[1].prompt + asked[1].tokens + [3] * 50, 5)
    assert stored_by(engine, [behind]) == 135 + 4 - (BLOCK if share else 0)
    again = request("c", behind.prompt + behind.tokens, 4)
    assert stored_by(engine, [again]) == 140 + 3 - (2 * BLOCK if share else 0)
    engine.resumed()
    last = request("d", again.prompt, 4)
    assert stored_by(engine, [last]) == 143
    as_alone(stock, [*asked, behind, again, last])


@pytest.mark.parametrize(
    ("name", "lengths", "news", "limits"),
    [
        *(("llama", (50, 30, 61, 10), 40, {"blocks": blocks, "tokens": 512}) for blocks in (2, 3, 5)),
        *(("mistral", (60, 63, 64, 65, 150, 200), 12, {"tokens": n, "rows": 6, "context": 512}) for n in (7, 512)),
    ],
)
@pytest.mark.share(2)
@pytest.mark.turns(2)
def test_where_blocks_run_out_and_where_windows_pass_their_ends(pair, name, lengths, news, limits):
    """Who came last waits. The step whose tokens see the last keys of a block still reads them, while others write."""
    model, stock = pair(name, **({} if name == "llama" else {"sliding_window": 5}))
    asked, engine = requests(lengths, news, 2), engine_of(model, **limits)
    finished(engine, asked)
    as_alone(stock, asked)
    assert engine.scheduler.preempted > 0 or limits.get("blocks") != 3


def test_who_fills_all_blocks_alone_fails_and_the_others_go_on(llama):
    model, stock = llama
    asked = requests((20, 30), (100, 9))
    finished(engine_of(model, blocks=1), asked)
    assert asked[0].error == "64 tokens fill all 1 blocks that there are" and len(asked[0].tokens) == 45
    as_alone(stock, asked[1:])


@pytest.mark.parametrize(
    ("length", "new", "children", "limits"), [(70, 9, 2, {"tokens": 512}), (20, 3, 7, {"rows": 2})]
)
def test_several_answers_to_one_prompt_share_it(llama, length, new, children, limits):
    """Also where there are more of them than rows."""
    model, stock = llama
    parent = requests((length,), new, 8)[0].with_children(children)
    family = parent.family
    assert sorted(one.id for one in finished(engine_of(model, **limits), [parent])) == [one.id for one in family]
    as_alone(stock, family)


def test_windows_give_blocks_back(pair):
    """Of a model all whose layers have one."""
    model, stock = pair("mistral", sliding_window=20)
    engine, asked, held = engine_of(model, tokens=512, rows=2, context=512), requests((90,), 36), []
    engine.add(asked[0])
    while engine.busy:
        engine.step()
        held.append(engine.allocator.blocks - 1 - engine.allocator.free)
    as_alone(stock, asked)
    assert max(held[2:]) <= 2 and engine.allocator.sets[0].window == 20


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rounded_keys_and_values(kind, pair):
    """As the same model rounds them for one request."""
    model, _ = pair("llama")
    accel.restore(model)
    accel.optimize(model, kv_cache=kind, cpu="fuse")
    asked = requests((5, 70, 33), 8, 4)
    finished(engine_of(model, tokens=512), asked)
    as_alone(model, asked)


@pytest.mark.parametrize("family", ["llama", "bamba"])  # which has states too
def test_nothing_that_was_stored_with_other_weights_is_found(family, pair, monkeypatch):
    monkeypatch.setattr(block_allocator, "WORTH", BLOCK)  # else states of so few tokens are not kept
    model, stock = pair(family)
    engine = engine_of(model, tokens=512)
    finished(engine, requests((100,), 4))
    with torch.no_grad():
        for one in (*model.parameters(), *stock.parameters()):
            one.mul_(1.1)
    again = requests((100,), 4)
    finished(engine, again)
    as_alone(stock, again)


def test_the_model_is_looked_at_now_and_then(llama, monkeypatch):
    engine, looks = engine_of(llama[0]), []
    monkeypatch.setattr(engine, "changed", lambda: looks.append(1))
    finished(engine, [request("a", [1, 2], 40)])
    assert len(looks) == 3
    finished(engine, [request("b", [1, 2], 2)])
    assert len(looks) == 4
