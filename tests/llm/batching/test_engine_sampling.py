"""Sampled requests through the engine: in any company each gets what it draws alone from stock's logits."""

import dataclasses

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from accel.llm.batching.sampler import Sampler
from accel.llm.batching.sampling import Sampling, SamplingDefaults
from support.llm.batching.engines import alone, engine_of, finished, prompts_of, request

LENGTHS, NEW = (40, 30, 64, 1, 5, 17, 70), 7
SETTINGS = (
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 20},
    {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.4},
    {"do_sample": True, "temperature": 1.6, "min_p": 0.05, "no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1, "min_new_tokens": 5},
    {},
)


@pytest.fixture
def llama(pair_of):
    return pair_of("llama")


def asked_of(stock, new=NEW):
    prompts = prompts_of(LENGTHS, stock.config.vocab_size, 3)
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
    "limits", [{"rows": 7, "tokens": 2048}, {"rows": 3, "tokens": 20}, {"pages": 3, "rows": 4}], ids=str
)
def test_each_request_draws_what_it_draws_alone(llama, limits):
    """Also where prompts are cut, where it waits for a row, and where it is put aside and computed again."""
    model, stock = llama
    short = "pages" in limits
    new = 40 if short else NEW
    asked = asked_of(stock, new)[: 4 if short else None]
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
    [one] = asked_of(stock)[1:2]
    ended = finished(engine_of(model, rows=3), [dataclasses.replace(one, children=4)])
    assert len({str(each.tokens) for each in ended}) == 5
    again = finished(engine_of(model, rows=8), [dataclasses.replace(asked_of(stock)[1], children=4)])
    assert {each.id: each.tokens for each in ended} == {each.id: each.tokens for each in again}


class Failing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 32:
            raise KeyError("too many tokens")
        return scores


def test_what_a_processor_raises_ends_that_request_alone(llama):
    model, stock = llama
    asked = asked_of(stock)
    asked.append(request("bad", asked[1].prompt, NEW, Sampling(host=LogitsProcessorList([Failing()]))))
    finished(engine_of(model), asked)
    assert "too many tokens" in asked[-1].error and len(asked[-1].tokens) == 2
    for one in asked[:-1]:
        assert one.error is None and one.tokens == drawn_alone(stock, one)
