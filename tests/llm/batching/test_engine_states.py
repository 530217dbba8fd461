"""Requests of hybrids together: states go on from part to part of a prompt, are shared, and are never another's."""

import copy
import dataclasses
from itertools import count

import pytest
import torch
from transformers import GenerationConfig

import accel
from accel.llm.batching import limits
from accel.llm.batching.limits import Limits, sets_of
from accel.llm.batching.trial import refusal
from accel.llm.kv_cache import block_allocator
from accel.llm.kv_cache.paged_kv_cache import block_bytes
from accel.llm.kv_cache.shape import BLOCK
from accel.llm.runtime.layer import BoundLayer
from support.llm.batching.engines import (
    alone,
    as_alone,
    engine_of,
    finished,
    forward_of,
    prompts_of,
    request,
    requests,
    step,
)
from support.llm.families import every, make
from support.llm.miniatures.family import VOCAB
from support.llm.miniatures.mambas import MAMBAS

LENGTHS, NEWS = (1, 5, 64, 17, 130, 40, 63, 65), (9, 28, 1, 5, 12, 7, 3, 20)
HYBRIDS = ("qwen3.5", "bamba")  # the delta rule, a state space


@pytest.fixture(autouse=True)
def short_texts_are_worth_it(monkeypatch):
    monkeypatch.setattr(block_allocator, "WORTH", BLOCK)


@pytest.fixture(params=HYBRIDS)
def hybrid(request, pair_of):
    return pair_of(request.param)


class Repeats:
    """In place of a runner of graphs: steps of the sizes of graphs, each run twice, as where one is captured."""

    def __init__(self):
        self.kvs = []

    def begin(self, args, kwargs, variant, at_once=True):
        return None

    def __call__(self, eager, args, kwargs, variant):
        eager(*args)
        return eager(*args)


@pytest.mark.parametrize("tokens", [7, 512])
def test_each_gets_what_it_gets_alone(hybrid, tokens):
    """Prompts are cut anywhere; some come late; steps are as large as their graphs, and may be repeated."""
    model, stock = hybrid
    assert refusal(forward_of(model)) is None and accel.report(model).summary().startswith("5 sites patched, 0 skipped")
    asked, engine = requests(LENGTHS, NEWS), engine_of(model, tokens=tokens)
    if tokens > 7:
        engine.steps.runner = Repeats()
    for one in asked[:3]:
        engine.add(one)
    for _ in range(4):
        step(engine)
    finished(engine, asked[3:])
    as_alone(stock, asked)


def counted(engine, requests):
    """Tokens that were computed for these."""
    found, launch = [], engine.steps.launch
    engine.steps.launch = lambda plan, *rest: (found.append(len(plan.tokens)), launch(plan, *rest))[1]
    finished(engine, requests)
    engine.steps.launch = launch
    return sum(found)


@pytest.mark.turns(2)
def test_states_are_found_at_ends_of_blocks(hybrid):
    """Behind the last full block of a prompt, and where a later one parted from it: never blocks without states."""
    model, stock = hybrid
    whole, *tails = prompts_of((200, 30, 30, 70), VOCAB, 9)
    first, engine = request("a", whole, 6), engine_of(model, tokens=512, context=512)
    assert counted(engine, [first]) == 205
    again, parted = request("b", whole, 6), request("c", whole[:150] + tails[0], 6)
    assert counted(engine, [again]) == 205 - 3 * BLOCK
    assert counted(engine, [parted]) == 185  # two blocks are known, and no states behind them
    alike = request("d", whole[:150] + tails[1], 6)
    assert counted(engine, [alike]) == 185 - 2 * BLOCK
    turn = request("e", whole + first.tokens + tails[2], 6)
    assert counted(engine, [turn]) == 281 - 3 * BLOCK
    told = request("told", tails[0], 110)
    assert counted(engine, [told]) == 139
    reply = request("reply", told.prompt + told.tokens + tails[1], 6)
    assert counted(engine, [reply]) == 175 - 2 * BLOCK  # an answer is gone on with too
    engine.resumed()
    anew = request("f", whole, 6)
    assert counted(engine, [anew]) == 205
    apart, unshared = request("g", whole, 6), engine_of(model, tokens=512, context=512, share=False)
    assert counted(unshared, [apart]) == 205 and not unshared.allocator.states.kept
    as_alone(stock, [first, again, parted, alike, turn, told, reply, anew, apart])


@pytest.mark.parametrize(("kind",), every(2, [MAMBAS[0], "jamba", "falcon-h1", "zamba2", MAMBAS[2]]), ids=str)
def test_scans_and_layers_with_keys_beside_their_state(kind):
    """A state a channel, alone or between layers with keys; two attentions a layer. Prompts are cut and shared too."""
    stock = make(kind)
    model = accel.optimize(copy.deepcopy(stock))
    assert refusal(forward_of(model)) is None
    asked, engine = requests((1, 40, 130, 17), (9, 20, 5, 12)), engine_of(model, tokens=32, context=256)
    for one in asked[:2]:
        engine.add(one)
    for _ in range(3):
        step(engine)
    finished(engine, asked[2:])
    again = dataclasses.replace(asked[2], id="again", tokens=[])
    assert counted(engine, [again]) == 134 - 2 * BLOCK
    engine.steps.runner = Repeats()
    more = requests((3, 70, 9), 7, 5)
    finished(engine, more)
    as_alone(stock, [*asked, again, *more])
    assert not accel.report(model).fallbacks


@pytest.mark.turns(4)
def test_where_blocks_and_slots_run_out(hybrid):
    """Who came last waits, and is computed again. Kept states go where rows need slots, the oldest first."""
    model, stock = hybrid
    asked, engine = requests((50, 30, 61, 10), 40, 2), engine_of(model, blocks=3, tokens=512)
    finished(engine, asked)
    assert engine.scheduler.preempted > 0
    as_alone(stock, asked)
    engine = engine_of(model, slots=5, tokens=512, rows=4)
    assert engine.limits.rows == 2 and len(engine.allocator.states.references) == 5
    asked = requests((70, 80, 140, 66, 90, 100), 9, 5)
    asked += [dataclasses.replace(one, id=f"{one.id} again", tokens=[]) for one in asked]
    finished(engine, asked)
    as_alone(stock, asked)
    assert 1 <= len(engine.allocator.states.kept) <= 5


def test_several_answers_and_cancelled_requests(hybrid):
    """Children go on from one state."""
    model, stock = hybrid
    parent, others = requests((70,), 9, 8)[0].with_children(3), requests((40, 30, 90), 9, 3)
    family, engine = parent.family, engine_of(model, tokens=50)
    for one in (parent, *others):
        engine.add(one)
    step(engine)
    assert engine.cancel("1") == [others[1]]
    finished(engine)
    as_alone(stock, [*family, others[0], others[2]])


def test_a_step_that_fails_half_way_is_as_if_it_had_not_been(hybrid, monkeypatch):
    """Requests that have begun go on from the states that they had."""
    model, stock = hybrid
    asked, engine = requests((20, 66), 12, 3), engine_of(model, tokens=512)
    layer, calls = BoundLayer.__call__, count()
    engine.add(asked[0])
    for _ in range(4):
        step(engine)

    def fails(self, *given):
        if next(calls) == 1:
            raise ValueError("bad luck")
        return layer(self, *given)

    monkeypatch.setattr(BoundLayer, "__call__", fails)
    engine.add(asked[1])
    before = int(engine.allocator.states.current[0])
    step(engine)
    assert "bad luck" in asked[1].error and engine.allocator.states.current[0] == before
    finished(engine)
    as_alone(stock, asked[:1])


@pytest.mark.turns(4)
def test_steps_in_time_that_are_held_between_limits_in_prompts_alone(pair):
    """Answers that are computed again are none; nor are what others find."""
    model, stock = pair("bamba", time_step_limit=(0.5, 0.8))
    assert refusal(forward_of(model)) is None and forward_of(model).layers[0].spec.attention.limits_prompts
    asked, engine = requests((50, 30, 61, 10), 70, 2), engine_of(model, blocks=5, tokens=512, context=512)
    finished(engine, asked)
    assert engine.scheduler.preempted > 0
    turn, one = request("turn", asked[0].prompt + asked[0].tokens + [3] * 20, 6), request("one", [5], 9)
    assert counted(engine, [turn, one]) == 145 + 9  # of the first text nothing
    again = request("again", turn.prompt, 6)
    assert counted(engine, [again]) == 145 - 2 * BLOCK
    as_alone(stock, [*asked, turn, one, again])


def test_generate_batch(hybrid):
    """Which transformers has not for these models; streamed tokens and settings are as of other models."""
    model, stock = hybrid
    prompts = prompts_of((5, 70, 33), VOCAB, 4)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    before = accel.report(model).fallbacks  # of other tests, which share the model
    found = model.generate_batch(prompts, generation_config=config)
    assert [one.generated_tokens for one in found.values()] == [alone(stock, prompt, 6) for prompt in prompts]
    assert accel.report(model).fallbacks == before
    assert copy.deepcopy(model).generate_batch(prompts[:1], generation_config=config)


def test_memory(hybrid, monkeypatch):
    """Rows are as many as have room for their states beside keys and values."""
    forward = forward_of(hybrid[0])
    shapes, sets = forward.shapes(), sets_of(forward)
    slot, block = sum(shape.slot_bytes for shape in shapes if not shape.size), block_bytes(shapes, sets)
    for slots, blocks, rows in ((10**6, 10**6, 64), (100, 10**4, 64), (51, 51 * slot // block, 20), (2, 2, 1)):
        monkeypatch.setattr(limits, "free_bytes", lambda device, free=slots * slot + blocks * block: free)
        fitted = Limits(rows=64, context=10**6, memory=1.0).fitted(shapes, sets)
        assert fitted.rows == rows and fitted.slots >= 2 * rows and fitted.blocks > 0
        assert fitted.slots * slot + (fitted.blocks + 1) * block <= slots * slot + blocks * block
    monkeypatch.setattr(limits, "free_bytes", lambda device: slot)
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory for states: \d+ MiB are the least"):
        Limits().fitted(shapes, sets)
