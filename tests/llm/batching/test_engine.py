"""Requests of different lengths together: each gets what stock gives it alone."""

import dataclasses

import pytest
import torch
from transformers.generation.continuous_batching.requests import RequestStatus

from support.llm.batching.engines import alone, engine_of, finished, prompts_of, request
from support.llm.families import BY_NAME, available

LENGTHS = (1, 5, 64, 17, 100, 40, 63, 65)
NEWS = (9, 28, 1, 5, 12, 7, 3, 20)
# One of each kind of layer: windows, biases by distance, learned positions, other rotations, sinks, experts.
FAMILIES = ("gemma2", "bloom", "gpt2", "gpt-neox", "glm", "gpt-oss", "qwen3-moe", "opt", "cohere", "mistral")


@pytest.fixture
def llama(pair_of):
    return pair_of("llama")


def asked_of(stock, count=8):
    prompts = prompts_of(LENGTHS[:count], stock.config.vocab_size)
    return [request(str(i), p, n) for i, (p, n) in enumerate(zip(prompts, NEWS, strict=False))]


def as_alone(stock, requests, **given):
    for one in requests:
        assert one.status is RequestStatus.FINISHED and one.error is None, one.error
        assert one.tokens == alone(stock, one.prompt, one.max_new_tokens, **given), one.id


@pytest.mark.parametrize("tokens", [7, 64, 2048])
def test_each_request_gets_what_it_gets_alone(llama, tokens):
    """tokens: of a step; prompts are cut."""
    model, stock = llama
    asked = asked_of(stock)
    ended = finished(engine_of(model, tokens=tokens), asked)
    assert sorted(one.id for one in ended) == [one.id for one in asked]
    as_alone(stock, asked)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer(name, pair_of):
    if name not in BY_NAME or not available(BY_NAME[name].kind):
        pytest.skip(f"no {name} here")
    model, stock = pair_of(name)
    asked = [request(str(i), p, 4) for i, p in enumerate(prompts_of((3, 40, 9, 21), stock.config.vocab_size))]
    finished(engine_of(model, tokens=30, rows=3), asked)
    as_alone(stock, asked)


def test_fused_layers_ran(llama, monkeypatch):
    """And not stock ones, which know of no sequences."""
    model, _ = llama
    engine = engine_of(model)
    calls = []
    over = engine.forward.over
    monkeypatch.setattr(engine.forward, "over", lambda kvs, *rest: (calls.append(kvs), over(kvs, *rest))[1])
    monkeypatch.setattr(type(engine.forward), "fast", None)
    finished(engine, [request("a", [5, 6, 7], 4)])
    assert len(calls) >= 4 and all(kv.ragged is not None for kvs in calls for kv in kvs)


def test_an_end_of_sequence_ends_it_and_is_part_of_the_answer(llama):
    model, stock = llama
    asked = asked_of(stock)
    wanted = [alone(stock, one.prompt, one.max_new_tokens) for one in asked]
    eos = frozenset((wanted[1][4], wanted[4][2], 98))
    asked = [dataclasses.replace(one, eos=eos) for one in asked]
    finished(engine_of(model), asked)
    as_alone(stock, asked, eos=sorted(eos))
    assert any(len(one.tokens) < one.max_new_tokens for one in asked)


def test_what_ends_it_may_be_the_users(llama):
    model, stock = llama
    [one] = asked_of(stock, 1)
    wanted = alone(stock, one.prompt, 9)
    one = dataclasses.replace(one, ends=lambda tokens: tokens[-2:] == wanted[2:4])
    finished(engine_of(model), [one])
    assert one.tokens == wanted[:4]


def test_no_bound_but_the_room_there_is(llama):
    model, stock = llama
    one = request("a", [1, 2, 3], None)
    finished(engine_of(model, context=20), [one])
    assert one.tokens == alone(stock, [1, 2, 3], 18)


def test_streaming_tells_every_token(llama):
    model, stock = llama
    asked = [dataclasses.replace(one, streaming=True, record_timestamps=True) for one in asked_of(stock, 4)]
    engine = engine_of(model)
    for one in asked:
        engine.add(one)
    seen = {one.id: [] for one in asked}
    while engine.busy:
        for one in engine.step():
            seen[one.id].append(list(one.tokens))
    for one in asked:
        assert seen[one.id] == [one.tokens[: i + 1] for i in range(one.max_new_tokens)]
        assert len(one.timestamps) == one.max_new_tokens and one.timestamps == sorted(one.timestamps)
        assert one.created <= one.started <= one.timestamps[0] <= one.timestamps[-1] <= one.ended
    as_alone(stock, asked)


class Replays:
    """In place of a runner of graphs: computes what is there, of the size that the graph has."""

    def __init__(self):
        self.sizes, self.begun = [], 0

    def begin(self, args, kwargs, variant):
        self.begun += 1

    def __call__(self, eager, args, kwargs, variant):
        assert not kwargs
        self.sizes.append((args[0].shape[1], *variant[1:]))
        return eager(*args)


def test_steps_of_the_sizes_of_graphs(llama):
    """What fills them up is nobody's."""
    model, stock = llama
    asked = asked_of(stock)
    engine = engine_of(model, rows=6, tokens=2048)
    engine.steps.runner = replays = Replays()
    finished(engine, asked)
    as_alone(stock, asked)
    assert 0 < replays.begun < len(replays.sizes)  # the model is looked at now and then
    assert (512, 6, 32) in replays.sizes or (256, 6, 32) in replays.sizes
    assert {size for size in replays.sizes if not size[2]} <= {(n, n, 0) for n in (1, 2, 4, 8)}
    asked = [request(str(i), [5] * 3, 3) for i in range(40)]  # more prompts in one step than any graph takes
    engine = engine_of(model, rows=40, tokens=2048, pages=200)
    engine.steps.runner = replays = Replays()
    finished(engine, asked)
    as_alone(stock, asked[:1])
    assert replays.sizes and all(size == (40, 40, 0) for size in replays.sizes)


def test_log_probabilities(llama):
    model, stock = llama
    asked = asked_of(stock, 3)
    finished(engine_of(model, logprobs=True), asked)
    for one in asked:
        ids = torch.tensor([one.prompt + one.tokens])
        wanted = stock(ids).logits[0, len(one.prompt) - 1 : -1].log_softmax(-1)
        wanted = wanted.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.logprobs), wanted, rtol=1e-4, atol=1e-4)
