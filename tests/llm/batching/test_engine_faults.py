"""Requests that fail and others that do not, and random ones at random times: nothing is lost."""

import copy
import itertools
import random
from functools import cache

import pytest
import torch

import accel
from accel.llm.batching.limits import sets_of
from accel.llm.batching.sampling import Sampling
from support.llm.batching.engines import (
    alone,
    as_alone,
    engine_of,
    finished,
    forward_of,
    request,
    requests,
    step,
    stepped,
)
from support.llm.families import FAMILIES, available, every
from support.llm.kv_cache.blocks import check_blocks
from support.spread import spread


def ends(tokens):
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("x", [1] * 300, 3), "a prompt of 300 tokens, where a request may come to 256"),
        (request("x", [1] * 200, 3), "a prompt of 200 tokens, where all memory for keys and values has room for 192"),
        (request("x", [1, 2], 5, stopping_criterion=ends), "a stopping criterion raised RuntimeError: no idea"),
    ],
)
def test_a_request_that_cannot_run_fails_alone(llama, bad, message):
    model, stock = llama
    good = request("a", [7, 8, 9], 6)
    assert {one.id for one in finished(engine_of(model, blocks=3), [good, bad])} == {"a", "x"}
    assert message in bad.error
    as_alone(stock, [good])


def test_logits_that_are_no_numbers(llama, monkeypatch):
    """Of one request; the others go on."""
    model, stock = llama
    asked, engine, calls = requests((20, 30, 9), 9, 3), engine_of(model, tokens=512), itertools.count(1)
    draw = engine.sampler.draw

    def poisoned(logits, rows, host_rows, *rest):
        if next(calls) == 3:
            logits[host_rows == 1] = float("nan")
        return draw(logits, rows, host_rows, *rest)

    monkeypatch.setattr(engine.sampler, "draw", poisoned)
    finished(engine, asked)
    [hurt] = [one for one in asked if one.error]
    assert "NaN" in hurt.error and len(hurt.tokens) == 2
    as_alone(stock, [one for one in asked if one is not hurt])


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
    asked, engine = requests((20, 30, 9), 9, 3), engine_of(model, tokens=512)
    failing(monkeypatch, engine, lambda plan, call: call == (4 if late else 2), error)
    engine.add(asked[0])
    engine.step()
    finished(engine, asked[1:])
    assert [one.error is None for one in asked] == ([False] * 3 if late else [True, False, False])
    after = request("after", [4, 5], 5)
    finished(engine, [after])
    as_alone(stock, [after] if late else [asked[0], after])


def test_windows_after_an_error_in_a_step(pair, monkeypatch):
    """What their tokens see is there still: nothing was given back for the step that did not run."""
    model, stock = pair("mistral", sliding_window=20)
    asked, engine = requests((60,), 60), engine_of(model, tokens=512, context=512)
    launch = engine.steps.launch
    failing(monkeypatch, engine, lambda plan, call: len(plan.rows) > plan.decodes and call > 1, ValueError("bad luck"))
    engine.add(asked[0])
    for _ in range(23):  # its window has passed a block by then
        engine.step()
    late = request("c", [4, 5], 4)
    engine.add(late)
    engine.step()
    assert "bad luck" in late.error and engine.scheduler.preempted == 0
    monkeypatch.setattr(engine.steps, "launch", launch)
    finished(engine)
    as_alone(stock, asked)


def test_an_error_of_the_gpu_is_raised(llama, monkeypatch):
    """And what fails then leaves nothing behind in an engine, which may be closed."""
    engine = engine_of(llama[0])
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")
    failing(monkeypatch, engine, lambda plan, call: call == 4, error)
    one = request("a", [1, 2], 40)
    engine.add(one)
    with pytest.raises(torch.AcceleratorError):
        stepped(engine)
    assert engine.fail(error) == [one] and "device-side" in one.error and not engine.busy
    check_blocks(engine.allocator)
    engine.close()
    assert not hasattr(engine, "kv_cache")


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelled_at_any_time(llama, steps):
    """Waiting, its prompt half read, or going on; a parent, or a child before it runs."""
    model, stock = llama
    parent = request("p", [5] * 30, 6).with_children(2)
    family, asked, engine = parent.family, [parent, *requests((40, 30, 9), 9, 3)], engine_of(model, rows=2)
    for one in asked:
        assert engine.add(one) == []
    told = [one for _ in range(steps) for one in engine.step()]
    gone = [one for name in ("0", "2", "p__child#1", "nobody") for one in engine.cancel(name)]
    assert gone == [asked[1], asked[3], family[2]]
    gone += engine.cancel("p")
    assert gone[3:] == ([parent] if steps > 1 else family[:2])  # with children that have not begun
    assert {one.error for one in gone} == {"the request was cancelled"}
    told += stepped(engine)
    assert {one.id for one in told} == {"1", *(["p__child#0"] if steps > 1 else ())}
    as_alone(stock, told)
    again = request("0", [5], 2)
    assert finished(engine, [again]) == [again] and again.error is None
    long = request("l", [1] * 300).with_children(1)
    assert engine.add(long) == long.family and "300 tokens" in long.family[1].error


def test_training_mode_fails_what_is_asked_then(pair):
    model, stock = pair("llama")
    engine = engine_of(model)
    model.train()
    [one] = finished(engine, [request("a", [1, 2], 4)])
    assert "training mode" in one.error
    model.eval()
    as_alone(stock, finished(engine, [request("b", [1, 2], 4)]))


FAST = [family.name for family in FAMILIES if family.expected == "fast" and available(family.kind)]
WINDOWS = [name for name in ("ministral", "gemma3", "gpt-oss") if name in FAST]
LENGTHS = (1, 2, 5, 20, 63, 64, 65, 90)  # around the end of a page, which windows pass
ROOM = 30  # tokens of an answer and more


def random_engine(model, chosen: random.Random):
    rows, tokens = chosen.randint(1, 7), chosen.choice([3, 8, 17, 64, 200])
    blocks = len(sets_of(forward_of(model))) * chosen.randint(4, 10)
    return engine_of(model, rows=rows, tokens=tokens, context=128, blocks=blocks)


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


# One of each kind of layer: windows, biases by distance, learned positions, other rotations, sinks, experts.
KINDS = (
    "qwen3.5",
    "bamba",
    "gemma2",
    "bloom",
    "gpt2",
    "gpt-neox",
    "glm",
    "gpt-oss",
    "qwen3-moe",
    "opt",
    "cohere",
    "mistral",
    "lfm2",
    "deepseek-v2",
    "deepseek-v3",
    "minicpm3",
)
NAMES = dict.fromkeys([*WINDOWS, *(one for one in KINDS if one in FAST), *(name for (name,) in every(12, FAST))])


@cache
def spread_of(name, pair_of):
    return accel.optimize(spread(copy.deepcopy(pair_of(name)[1]), first=1))


@pytest.mark.share(24)
@pytest.mark.parametrize(
    ("name", "devices"), [*((name, 1) for name in NAMES), *((name, 2) for name in (*WINDOWS, "llama", "mixtral"))]
)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.turns(2)
def test_each_is_as_if_alone(name, devices, seed, pair_of):
    model, stock = pair_of(name)
    model = model if devices == 1 else spread_of(name, pair_of)
    config, chosen = stock.config.get_text_config(), random.Random(seed)
    most = min(getattr(config, "max_position_embeddings", None) or 128, 128)
    engine, asked = random_engine(model, chosen), random_requests(config.vocab_size, most, chosen)
    coming = sorted((chosen.choice([0, 0, chosen.randint(1, 15)]), number) for number in range(len(asked)))
    cancelled, when = chosen.choice(asked), chosen.randint(1, 20)
    for number in range(21):
        while coming and coming[0][0] <= number:
            engine.add(asked[coming.pop(0)[1]])
        if number == when:
            engine.cancel(cancelled.id)
        step(engine)
    stepped(engine)
    for one in asked:
        if one is cancelled and one.error is not None:
            continue
        assert one.error is None, one.error
        given = {"eos": list(one.eos) or None, "repetition_penalty": one.sampling.penalty}
        assert one.tokens == alone(stock, one.prompt, one.max_new_tokens, **given), one.id
