"""Requests of different lengths, drawn and greedy, together: each gets what stock gives it alone."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig

from accel.llm.batching.request import StopStrings
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.sampling import SamplingDefaults
from support.llm.batching.engines import alone, as_alone, engine_of, finished, request, requests
from support.llm.calls import tokenizer

LENGTHS = (1, 5, 64, 17, 100, 40, 63, 65)
NEWS = (9, 28, 1, 5, 12, 7, 3, 20)


@pytest.mark.parametrize("tokens", [7, 64, 2048])
def test_each_request_gets_what_it_gets_alone(llama, tokens):
    """tokens: of a step; prompts are cut."""
    model, stock = llama
    asked = requests(LENGTHS, NEWS)
    ended = finished(engine_of(model, tokens=tokens), asked)
    assert sorted(one.id for one in ended) == [one.id for one in asked]
    as_alone(stock, asked)


def test_fused_layers_ran(llama, monkeypatch):
    """And not stock ones, which know of no sequences."""
    model, _ = llama
    engine = engine_of(model)
    calls = []
    own = engine.forward.logits_of
    monkeypatch.setattr(engine.forward, "logits_of", lambda step, *rest: (calls.append(step.kvs), own(step, *rest))[1])
    monkeypatch.setattr(type(engine.forward), "fast", None)
    finished(engine, [request("a", [5, 6, 7], 4)])
    assert len(calls) >= 4 and all(kv.ragged is not None for kvs in calls for kv in kvs.values())


@pytest.mark.turns(2)
def test_ends(llama):
    """At a token of the request's own, which is part of the answer; at stop strings; where there is no more room."""
    model, stock = llama
    asked, words = requests(LENGTHS, NEWS), tokenizer()
    wanted = [alone(stock, one.prompt, one.max_new_tokens) for one in asked]
    eos = frozenset((wanted[1][4], wanted[4][2], 98))
    asked = [dataclasses.replace(one, eos=eos) for one in asked]
    strings = [words.decode(wanted[7][8:10])]
    stops = request("s", asked[7].prompt, NEWS[7], stopping_criterion=StopStrings(strings, words, LENGTHS[7]))
    roomy, nothing = request("r", [1, 2, 3], None), request("n", [1, 2], 0)
    finished(engine_of(model, context=120), [*asked, stops, roomy, nothing])
    as_alone(stock, asked, eos=sorted(eos))
    assert any(len(one.tokens) < one.max_new_tokens for one in asked)
    assert stops.tokens == alone(stock, stops.prompt, NEWS[7], stop_strings=strings, tokenizer=words)
    assert len(stops.tokens) < NEWS[7] and roomy.tokens == alone(stock, [1, 2, 3], 118)
    assert nothing.tokens == [] and nothing.error is None


def test_streaming_tells_every_token(llama):
    model, stock = llama
    engine, asked = engine_of(model), requests(LENGTHS[:4], NEWS[:4], streaming=True, record_timestamps=True)
    seen = {one.id: [] for one in asked}
    for one in asked:
        engine.add(one)
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

    def begin(self, args, kwargs, variant, at_once=True):
        self.begun += 1

    def __call__(self, eager, args, kwargs, variant):
        assert not kwargs
        self.sizes.append((args[0].shape[1], *variant[1:]))
        return eager(*args)


def test_steps_of_the_sizes_of_graphs(llama):
    """What fills them up is nobody's."""
    model, stock = llama
    for asked, limits in (
        (requests(LENGTHS, NEWS), {"rows": 6}),
        (requests((3,) * 40, 3), {"rows": 40, "blocks": 200}),  # more prompts in one step than any graph takes
    ):
        engine = engine_of(model, tokens=2048, **limits)
        engine.steps.runner = replays = Replays()
        finished(engine, asked)
        as_alone(stock, asked[:8])
        if limits["rows"] == 6:
            assert 0 < replays.begun < len(replays.sizes)  # the model is looked at now and then
            assert (512, 6, 32) in replays.sizes or (256, 6, 32) in replays.sizes
            assert {size for size in replays.sizes if not size[2]} <= {(n, n, 0) for n in (1, 2, 4, 8)}
        else:
            assert replays.sizes and all(size == (40, 40, 0) for size in replays.sizes)


DRAWN_LENGTHS, NEW = (40, 30, 64, 1, 5, 17, 70), 7
SETTINGS = (
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.4},
    {"do_sample": True, "temperature": 1.6, "min_p": 0.05, "no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1, "min_new_tokens": 5},
    {},
)


def drawn_of(stock, new=NEW):
    asked = requests(DRAWN_LENGTHS, new, 3)
    for one in asked:
        one.sampling = sampling_of(stock, one)
    assert [one.sampling.host is not None for one in asked] == [False] * 3 + [True, False, True, False]
    return asked


def sampling_of(stock, one):
    every = SamplingDefaults(stock, GenerationConfig(**SETTINGS[int(one.id)]))
    return every.request(one.prompt, one.max_new_tokens, [2], seed=5)


def drawn_alone(stock, one):
    """From the logits of stock's forward over all tokens, a token at a time."""
    sampler, tokens = Sampler(1, stock.config.vocab_size, "cpu"), list(one.prompt)
    sampler.set(0, sampling_of(stock, one), tokens)
    for _ in range(one.max_new_tokens):
        with torch.no_grad():
            logits = stock(torch.tensor([tokens])).logits[:, -1]
        tokens.append(int(sampler.draw(logits, torch.tensor([0]), torch.tensor([0]).numpy(), lambda row: tokens)[0]))
    return tokens[len(one.prompt) :]


@pytest.mark.parametrize(
    "limits", [{"rows": 7, "tokens": 2048}, {"rows": 3, "tokens": 20}, {"blocks": 3, "rows": 4}], ids=str
)
def test_each_request_draws_what_it_draws_alone(llama, limits):
    """Also where prompts are cut, where it waits for a row, and where it is put aside and computed again."""
    model, stock = llama
    short = "blocks" in limits
    new = 40 if short else NEW
    asked = drawn_of(stock, new)[: 4 if short else None]
    engine = engine_of(model, logprobs=True, **limits)
    finished(engine, asked)
    for one in asked:
        assert one.error is None and one.tokens == drawn_alone(stock, one), SETTINGS[int(one.id)]
        assert len(one.logprobs) == new
    for one in asked[4:]:  # greedy: also what generate() gives, which stops at the end of sequence
        wanted = alone(stock, one.prompt, new, eos=2, **SETTINGS[int(one.id)])
        assert one.tokens[: len(wanted)] == wanted
    assert (engine.scheduler.preempted > 0) == short


def test_children_draw_for_themselves(llama):
    model, stock = llama
    [one] = drawn_of(stock)[1:2]
    ended = finished(engine_of(model, rows=3), [one.with_children(4)])
    assert len({str(each.tokens) for each in ended}) == 5
    again = finished(engine_of(model, rows=8), [drawn_of(stock)[1].with_children(4)])
    assert {each.id: each.tokens for each in ended} == {each.id: each.tokens for each in again}


class Letters:
    """One token a letter; two tokens make an umlaut."""

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("~a", "ä")


@pytest.mark.parametrize(
    ("strings", "answer", "ends"),
    [
        ("stop", "do not stop", True),
        ("stop", "do not sto", False),
        (("x", "no st"), "do no st", True),
        ("ä", "b~a", True),
        ("ä", "b~", False),
        ("prompt", "", False),  # what stands before the answer is none of it
        ("", "", "stop_strings=''"),
        ([3], "", r"stop_strings=\[3\]"),
        ("a", None, "need the model's tokenizer"),
    ],
)
def test_strings_end_an_answer(strings, answer, ends):
    """ends: or what is wrong with the strings, or with no tokenizer."""
    if isinstance(ends, str):
        with pytest.raises(ValueError, match=ends):
            StopStrings(strings, None if answer is None else Letters(), 0)
    else:
        assert StopStrings(strings, Letters(), len("prompt"))(list(map(ord, "prompt" + answer))) is ends
