"""Requests that fail and others that do not, and random ones at random times: nothing is lost."""

import copy
import dataclasses
import itertools
import random
from functools import cache

import pytest
import torch

import accel
from accel.llm.batching.sampling import Sampling
from accel.llm.kv_cache.layer_sets import layer_sets
from support.llm.batching.engines import alone, engine_of, finished, forward_of, prompts_of, request
from support.llm.families import FAMILIES, available, every
from support.llm.kv_cache.blocks import check_blocks
from support.spread import spread


@pytest.fixture
def llama(pair_of):
    return pair_of("llama")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", [1] * 300, 3), "a prompt of 300 tokens, where a request may come to 256"),
        (request("x", [1] * 200, 3), "a prompt of 200 tokens, where all memory for keys and values has room for 192"),
    ],
)
def test_a_request_that_cannot_run_fails_alone(llama, bad, message):
    model, stock = llama
    good, bad = request("a", [7, 8, 9], 6), dataclasses.replace(bad, tokens=[])
    ended = finished(engine_of(model, blocks=3), [good, bad])
    assert ended[0] is bad and message in bad.error and not bad.tokens
    assert ended[1] is good and good.tokens == alone(stock, good.prompt, 6)


def test_logits_that_are_no_numbers(llama, monkeypatch):
    """Of one request; the others go on."""
    model, stock = llama
    asked = [request(str(i), p, 9) for i, p in enumerate(prompts_of([20, 30, 9], 99, 3))]
    engine = engine_of(model, tokens=512)
    draw, calls = engine.sampler.draw, []

    def poisoned(logits, rows, host_rows, *rest):
        calls.append(1)
        hurt = [place for place, row in enumerate(host_rows) if row == 1]
        if len(calls) == 3:
            logits[hurt] = float("nan")
        return draw(logits, rows, host_rows, *rest)

    monkeypatch.setattr(engine.sampler, "draw", poisoned)
    finished(engine, asked)
    hurt = [one for one in asked if one.error]
    assert len(hurt) == 1 and "NaN" in hurt[0].error and len(hurt[0].tokens) == 2
    for one in asked:
        assert one is hurt[0] or one.tokens == alone(stock, one.prompt, 9)


def failing(monkeypatch, engine, when, error: Exception) -> None:
    """Steps raise where `when` says so of their plan and of how many there have been."""
    launch, calls = engine.steps.launch, itertools.count(1)

    def launched(plan, *rest):
        if when(plan, next(calls)):
            raise error
        return launch(plan, *rest)

    monkeypatch.setattr(engine.steps, "launch", launched)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), ValueError("bad luck")])
@pytest.mark.parametrize(("late", "name"), [(False, "llama"), (True, "llama"), (True, "mistral")])
def test_an_error_in_a_step(pair_of, monkeypatch, error, late, name):
    """Who begins in that step fails; late: a step in which nobody does, and all in it fail."""
    model, stock = pair_of(name)
    asked = [request(str(i), p, 9) for i, p in enumerate(prompts_of([20, 30, 9], 99, 3))]
    engine = engine_of(model, tokens=512)
    failing(monkeypatch, engine, lambda plan, call: call == (4 if late else 2), error)
    engine.add(asked[0])
    engine.step()
    finished(engine, asked[1:])
    assert [one.error is None for one in asked] == ([False] * 3 if late else [True, False, False])
    after = request("after", [4, 5], 5)
    finished(engine, [after])
    for one in (asked[0], after) if not late else (after,):
        assert one.tokens == alone(stock, one.prompt, one.max_new_tokens)


def test_an_error_of_the_gpu_is_raised(llama, monkeypatch):
    model, _ = llama
    engine = engine_of(model)

    def failing(*_):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(engine.steps, "launch", failing)
    one = request("a", [1, 2], 4)
    engine.add(one)
    with pytest.raises(torch.AcceleratorError) as raised:
        engine.step()
    assert engine.fail(raised.value) == [one] and "device-side" in one.error and not engine.busy
    check_blocks(engine.allocator)


def test_a_criterion_that_raises_fails_its_request(llama):
    model, stock = llama

    def ends(tokens):
        raise RuntimeError("no idea")

    bad, good = request("x", [1, 2], 5, ends=ends), request("a", [3, 4], 5)
    finished(engine_of(model), [bad, good])
    assert "no idea" in bad.error and good.tokens == alone(stock, [3, 4], 5)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelled_at_any_time(llama, steps):
    """Waiting, its prompt half read, or going on; of it nothing more is told."""
    model, stock = llama
    asked = [request(str(i), p, 9) for i, p in enumerate(prompts_of([40, 30, 9], 99, 3))]
    engine = engine_of(model, rows=2)
    for one in asked:
        engine.add(one)
    told = []
    for _ in range(steps):
        told += engine.step()
    gone = [one for name in ("0", "2", "nobody") for one in engine.cancel(name)]
    assert gone == [asked[0], asked[2]] and {one.error for one in gone} == {"the request was cancelled"}
    told += finished(engine)
    assert told == [asked[1]] and asked[1].tokens == alone(stock, asked[1].prompt, 9)
    again = request("0", [5], 2)
    assert finished(engine, [again]) == [again] and again.error is None


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("gone", ["p", "p__child#1"])
def test_cancelled_before_the_children_run(llama, steps, gone):
    """Of a parent all end, of a child it alone."""
    model, stock = llama
    parent = request("p", prompts_of([30], 99)[0], 6).with_children(2)
    family, engine = parent.family, engine_of(model)
    assert engine.add(parent) == []
    for _ in range(steps):
        assert not engine.step()
    ended = engine.cancel(gone)
    assert ended == (family if gone == "p" else family[2:])
    assert {one.error for one in ended} == {"the request was cancelled"}
    left = finished(engine)
    assert {one.id for one in left} == {one.id for one in family} - {one.id for one in ended}
    assert all(one.tokens == alone(stock, parent.prompt, 6) for one in left)
    long = request("p", [1] * 300).with_children(1)
    assert engine_of(model).add(long) == long.family and "300 tokens" in long.family[1].error


def test_nothing_is_asked_for(llama):
    model, _ = llama
    one = request("a", [1, 2], 0)
    assert finished(engine_of(model), [one]) == [one] and one.error is None and one.tokens == []


def test_training_mode_fails_what_is_asked_then(pair):
    model, stock = pair("llama")
    engine = engine_of(model)
    model.train()
    one = request("a", [1, 2], 4)
    finished(engine, [one])
    assert "training mode" in one.error
    model.eval()
    one = request("b", [1, 2], 4)
    finished(engine, [one])
    assert one.tokens == alone(stock, [1, 2], 4)


def test_nothing_is_left_when_it_is_closed(llama):
    model, _ = llama
    engine = engine_of(model)
    engine.add(request("a", [1, 2], 40))
    for _ in range(4):
        engine.step()
    assert [one.id for one in engine.fail(RuntimeError("stopped"))] == ["a"] and not engine.busy
    engine.close()
    assert not hasattr(engine, "kv_cache")


def test_windows_after_an_error_in_a_step(pair, monkeypatch):
    """What their tokens see is there still: nothing was given back for the step that did not run."""
    model, stock = pair("mistral", sliding_window=20)
    asked = [request("a", prompts_of([60], 99)[0], 60)]
    engine = engine_of(model, tokens=512, context=512)
    launch = engine.steps.launch
    failing(monkeypatch, engine, lambda plan, call: len(plan.rows) > plan.decodes and call > 1, ValueError("bad luck"))
    engine.add(asked[0])
    for _ in range(23):  # its window has passed a page by then
        engine.step()
    late = request("c", [4, 5], 4)
    engine.add(late)
    engine.step()
    assert "bad luck" in late.error and engine.scheduler.preempted == 0
    monkeypatch.setattr(engine.steps, "launch", launch)
    finished(engine)
    assert asked[0].tokens == alone(stock, asked[0].prompt, 60)


FAST = [family.name for family in FAMILIES if family.expected == "fast" and available(family.kind)]
WINDOWS = [name for name in ("ministral", "gemma3", "gpt-oss") if name in FAST]
LENGTHS = (1, 2, 5, 20, 63, 64, 65, 90)  # around the end of a page, which windows pass
ROOM = 30  # tokens of an answer and more


def random_engine(model, chosen: random.Random):
    forward = forward_of(model)
    sets = layer_sets(forward.shapes(), [layer.spec.attention.sees for layer in forward.layers])
    return engine_of(
        model, rows=chosen.randint(1, 7), tokens=chosen.choice([3, 8, 17, 64, 200]), context=128,
        blocks=len(sets) * chosen.randint(4, 10),
    )  # fmt: skip


def random_requests(vocabulary: int, most: int, chosen: random.Random) -> list:
    shared = [chosen.randrange(vocabulary) for _ in range(max(LENGTHS))]
    made = []
    for number in range(7):
        length = max(1, min(chosen.choice(LENGTHS), most - ROOM))
        own = [chosen.randrange(vocabulary) for _ in range(length)]
        prompt = shared[:length] if chosen.random() < 0.4 else own
        if chosen.random() < 0.3:
            prompt = prompt[:-1] + own[-1:]
        eos = frozenset(chosen.sample(range(vocabulary), chosen.choice([0, 3, 20])))
        sampling = Sampling(penalty=chosen.choice([1.0, 1.3]))
        made.append(request(str(number), prompt, chosen.choice([1, 2, 7, 15]), sampling, eos=eos))
    return made


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", dict.fromkeys([*WINDOWS, *(name for (name,) in every(12, FAST))]))
def test_each_is_as_if_alone(name, seed, pair_of):
    as_if_alone(*pair_of(name), seed)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [*WINDOWS, "llama", "mixtral"])
def test_layers_on_several_devices(name, seed, pair_of):
    _, stock = pair_of(name)
    as_if_alone(spread_of(name, pair_of), stock, seed)


@cache
def spread_of(name, pair_of):
    return accel.optimize(spread(copy.deepcopy(pair_of(name)[1]), first=1))


def as_if_alone(model, stock, seed):
    config, chosen = stock.config.get_text_config(), random.Random(seed)
    most = min(getattr(config, "max_position_embeddings", None) or 128, 128)
    if most <= ROOM:
        pytest.skip("too few positions for an answer")
    engine, asked = random_engine(model, chosen), random_requests(config.vocab_size, most, chosen)
    coming = sorted((chosen.choice([0, 0, chosen.randint(1, 15)]), number) for number in range(len(asked)))
    cancelled, when = chosen.choice(asked), chosen.randint(1, 20)
    for step in range(2000):
        while coming and coming[0][0] <= step:
            engine.add(asked[coming.pop(0)[1]])
        if step == when:
            engine.cancel(cancelled.id)
        engine.step()
        check_blocks(engine.allocator)
        if not coming and not engine.busy:
            break
    assert engine.allocator.free == engine.allocator.blocks - 1
    for one in asked:
        if one is cancelled and one.error is not None:
            continue
        assert one.error is None, one.error
        ids = torch.tensor([one.prompt])
        wanted = stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=one.max_new_tokens, do_sample=False,
            pad_token_id=0, eos_token_id=list(one.eos) or None, repetition_penalty=one.sampling.penalty,
        )  # fmt: skip
        assert one.tokens == wanted[0, len(one.prompt) :].tolist(), one.id
