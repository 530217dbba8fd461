"""Requests of different lengths, drawn and greedy, together: each gets what stock gives it alone."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching.requests import RequestStatus

from accel.llm.batching.request import StopStrings
from accel.llm.batching.sampler import Sampler
from accel.llm.batching.sampling import Sampling, SamplingDefaults
from support.llm.batching.engines import alone, engine_of, finished, prompts_of, request
from support.llm.calls import tokenizer

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
    model, stock = pair_of(name)
    asked = [request(str(i), p, 4) for i, p in enumerate(prompts_of((3, 40, 9, 21), stock.config.vocab_size))]
    finished(engine_of(model, tokens=30, rows=3), asked)
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


def test_an_end_of_sequence_ends_it_and_is_part_of_the_answer(llama):
    model, stock = llama
    asked = asked_of(stock)
    wanted = [alone(stock, one.prompt, one.max_new_tokens) for one in asked]
    eos = frozenset((wanted[1][4], wanted[4][2], 98))
    asked = [dataclasses.replace(one, eos=eos) for one in asked]
    finished(engine_of(model), asked)
    as_alone(stock, asked, eos=sorted(eos))
    assert any(len(one.tokens) < one.max_new_tokens for one in asked)


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
    engine = engine_of(model, rows=40, tokens=2048, blocks=200)
    engine.steps.runner = replays = Replays()
    finished(engine, asked)
    as_alone(stock, asked[:1])
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
    prompts = prompts_of(DRAWN_LENGTHS, stock.config.vocab_size, 3)
    samplings = [
        SamplingDefaults(stock, GenerationConfig(**given)).request(prompt, new, [2], seed=5)
        for prompt, given in zip(prompts, SETTINGS, strict=True)
    ]
    assert [sampling.host is not None for sampling in samplings] == [False] * 3 + [True, False, True, False]
    return [request(str(i), p, new, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]


def drawn_alone(stock, one):
    """From the logits of stock's forward over all tokens, a token at a time."""
    sampler, tokens = Sampler(1, stock.config.vocab_size, "cpu"), list(one.prompt)
    given = SETTINGS[int(one.id)]
    sampling = SamplingDefaults(stock, GenerationConfig(**given)).request(one.prompt, one.max_new_tokens, [2], seed=5)
    sampler.set(0, sampling, tokens)
    for _ in range(one.max_new_tokens):
        with torch.no_grad():
            logits = stock(torch.tensor([tokens])).logits[:, -1]
        tokens.append(int(sampler.draw(logits, torch.tensor([0]), torch.tensor([0]).numpy(), lambda row: tokens)))
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
    ended = finished(engine_of(model, rows=3), [dataclasses.replace(one, children=4)])
    assert len({str(each.tokens) for each in ended}) == 5
    again = finished(engine_of(model, rows=8), [dataclasses.replace(drawn_of(stock)[1], children=4)])
    assert {each.id: each.tokens for each in ended} == {each.id: each.tokens for each in again}


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 32:
            raise KeyError("too many tokens")
        return scores


def test_what_a_processor_raises_ends_that_request_alone(llama):
    model, stock = llama
    asked = drawn_of(stock)
    asked.append(request("bad", asked[1].prompt, NEW, Sampling(host=LogitsProcessorList([Failing()]))))
    finished(engine_of(model), asked)
    assert "too many tokens" in asked[-1].error and len(asked[-1].tokens) == 2
    for one in asked[:-1]:
        assert one.error is None and one.tokens == drawn_alone(stock, one)


class Letters:
    """One token a letter; two tokens make an umlaut."""

    def decode(self, ids):
        return "".join(map(chr, ids)).replace("~a", "ä")


def ids(text):
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("strings", "answer", "ends"),
    [
        ("stop", "do not stop", True),
        ("stop", "do not sto", False),
        (("x", "no st"), "do no st", True),
        ("ä", "b~a", True),
        ("ä", "b~", False),
        ("prompt", "", False),  # what stands before the answer is none of it
    ],
)
def test_strings_end_an_answer(strings, answer, ends):
    prompt = "prompt"
    assert StopStrings(strings, Letters(), len(prompt))(ids(prompt + answer)) is ends


@pytest.mark.parametrize(
    ("strings", "given", "message"),
    [
        ("", Letters(), "stop_strings=''"),
        ([3], Letters(), r"stop_strings=\[3\]"),
        ("a", None, "need the model's tokenizer"),
    ],
)
def test_what_is_no_string_or_no_tokenizer(strings, given, message):
    with pytest.raises(ValueError, match=message):
        StopStrings(strings, given, 0)


def test_as_generate_has_it(pair_of):
    model, stock = pair_of("llama")
    words = tokenizer()
    free = alone(stock, [5, 6, 7], 20)
    strings = [words.decode(free[8:10])]
    wanted = alone(stock, [5, 6, 7], 20, stop_strings=strings, tokenizer=words)
    one = request("a", [5, 6, 7], 20, ends=StopStrings(strings, words, 3))
    finished(engine_of(model), [one])
    assert one.tokens == wanted and len(wanted) < 20
