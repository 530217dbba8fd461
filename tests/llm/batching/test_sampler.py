"""Drawing for many requests at once, against transformers' own processors and `generate()`, each request alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from accel.llm.batching.sampler import Sampler, bits_of
from accel.llm.batching.sampling import Sampling, SamplingDefaults

VOCABULARY = 99
NEW = 9
PROMPT = [76, 32, 16, 31, 82, 5, 76]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=[2, 3], pad_token_id=0, initializer_range=0.5)
    return LlamaForCausalLM(config).eval()


def answers(model, requests):
    """Tokens and log probabilities of each (prompt, Sampling), drawn together, one a step: what an engine does."""
    sampler = Sampler(len(requests) + 3, VOCABULARY, "cpu")
    rows = np.arange(len(requests))[::-1] + 2  # in another order than the logits
    tokens = {int(row): list(prompt) for row, (prompt, _) in zip(rows, requests, strict=True)}
    for row, (prompt, sampling) in zip(rows, requests, strict=True):
        sampler.set(int(row), sampling, prompt)
    logprobs = {row: [] for row in tokens}
    with torch.no_grad():
        for _ in range(NEW):
            logits = torch.stack([model(torch.tensor([tokens[int(row)]])).logits[0, -1] for row in rows])
            ids, found = sampler.draw(logits, torch.from_numpy(rows.copy()), rows, tokens.__getitem__, logprobs=True)
            for row, token, logprob in zip(rows, ids.tolist(), found.tolist(), strict=True):
                tokens[int(row)].append(token)
                logprobs[int(row)].append(logprob)
    return [(tokens[int(row)][-NEW:], logprobs[int(row)]) for row in rows]


GREEDY = [
    {},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    {"bad_words_ids": [[12], [77, 90]]},
    {"sequence_bias": [[[17], 3.0], [[77, 90], -9.0]]},
    {"min_length": 12, "eos_token_id": 77},
    {"min_new_tokens": 4, "min_length": 99, "eos_token_id": list(range(10, 90))},
    {"suppress_tokens": list(range(60))},
    {"begin_suppress_tokens": list(range(3, 90))},
    {"forced_eos_token_id": 3},
    {"exponential_decay_length_penalty": (2, 1.6)},
    {"renormalize_logits": True},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"encoder_repetition_penalty": 2.0},
    {"encoder_repetition_penalty": 2.0, "encoder_no_repeat_ngram_size": 1},
    {"watermarking_config": {"greenlist_ratio": 0.3, "bias": 4.0}},
]
ON_GPU = {"repetition_penalty", "renormalize_logits"}


def generated(model, settings):
    """By generate(), which stops at EOS."""
    told = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    config = GenerationConfig(**told | {"eos_token_id": [2, 3]} | settings)
    out = model.generate(torch.tensor([PROMPT]), generation_config=config)
    tokens = out.sequences[0, len(PROMPT) :].tolist()
    logprobs = [float(s[0].log_softmax(-1)[t]) for s, t in zip(out.scores, tokens, strict=True)]
    return tokens, logprobs


def test_greedy_tokens_are_those_of_generate_whatever_the_processors(model):
    """All in one batch."""
    requests, wanted = [], []
    for settings in GREEDY:
        config = GenerationConfig(**{"eos_token_id": [2, 3]} | settings)
        sampling = SamplingDefaults(model, config).request(PROMPT, NEW)
        assert (sampling.host is None) == (not settings.keys() - ON_GPU), settings
        requests.append((PROMPT, sampling))
        wanted.append(generated(model, settings))
    assert len({str(tokens) for tokens, _ in wanted}) >= len(GREEDY) - 6  # they do something
    for settings, (tokens, logprobs), (theirs, scores) in zip(GREEDY, answers(model, requests), wanted, strict=True):
        assert tokens[: len(theirs)] == theirs, settings
        torch.testing.assert_close(logprobs[: len(theirs)], scores, rtol=1e-4, atol=1e-4)


SAMPLED = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_h": 0.6, "top_k": 20},
    {"typical_p": 0.8},
    {"epsilon_cutoff": 0.01, "top_k": 50},
    {"eta_cutoff": 0.02, "temperature": 1.4},
    {"no_repeat_ngram_size": 2, "temperature": 1.2, "top_p": 0.8},
    {"watermarking_config": {"ngram_len": 3, "keys": [1, 2, 3, 4], "context_history_size": 8}},  # keeps a state
]


def test_sampled_tokens_have_the_probability_that_transformers_gives_them(model):
    """Every token drawn, by transformers' own chain over the same tokens; processors are not shared."""
    requests, chains = [], []
    for number, settings in enumerate(SAMPLED * 2):
        if "watermarking_config" in settings:
            from transformers import SynthIDTextWatermarkingConfig

            settings = {"watermarking_config": SynthIDTextWatermarkingConfig(**settings["watermarking_config"])}
        config = GenerationConfig(do_sample=True, eos_token_id=2, **settings)
        requests.append((PROMPT, SamplingDefaults(model, config).request(PROMPT, NEW, seed=number)))
        config._eos_token_tensor = torch.tensor([2])
        chains.append(model._get_logits_processor(config, input_ids_seq_length=len(PROMPT), device="cpu"))
    found = answers(model, requests)
    for (tokens, logprobs), chain in zip(found, chains, strict=True):
        for n, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            ids = torch.tensor([PROMPT + tokens[:n]])
            with torch.no_grad():
                scores = chain(ids, model(ids).logits[:, -1].float())
            assert scores[0, token] > -torch.inf
            assert float(scores.log_softmax(-1)[0, token]) == pytest.approx(logprob, rel=1e-4, abs=1e-4)
    assert answers(model, [requests[0], requests[3]])[0][0] == found[0][0]  # company changes nothing


class Bad(LogitsProcessor):
    """Raises at the second call."""

    def __init__(self, error):
        self.calls, self.error = 0, error

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return scores


class Wide(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.repeat(2, 1)


def test_an_error_of_a_processor_is_that_requests_alone():
    sampler = Sampler(4, VOCABULARY, "cpu")
    sampler.set(0, Sampling(), [1])
    sampler.set(1, Sampling(host=LogitsProcessorList([Bad(KeyError("mine"))])), [1])
    sampler.set(2, Sampling(host=LogitsProcessorList([Wide()])), [1])
    logits, rows = torch.randn(4, VOCABULARY).bfloat16(), np.array([2, 1, 0, -1])

    def draw():
        return sampler.draw(logits, torch.from_numpy(rows), rows, lambda row: [1, 2])[0].tolist()

    best = logits.float().argmax(-1).tolist()
    assert draw() == [-1, best[1], best[2], -1]
    assert draw() == [-1, -1, best[2], -1]
    assert isinstance(sampler.error(1), KeyError) and "mine" in str(sampler.error(1))
    assert "Wide gave scores of shape (2, 99)" in str(sampler.error(2))
    assert "NaN" in str(sampler.error(0))
    sampler.set(1, Sampling(), [1])
    assert "NaN" in str(sampler.error(1)) and draw() == [-1, best[1], best[2], -1]
    fatal = Bad(torch.OutOfMemoryError("CUDA out of memory"))
    fatal.calls = 1
    sampler.set(2, Sampling(host=LogitsProcessorList([fatal])), [1])
    with pytest.raises(torch.OutOfMemoryError):
        draw()


def test_tokens_are_asked_of_requests_that_need_them_and_of_no_other():
    sampler = Sampler(3, VOCABULARY, "cpu")
    sampler.set(0, Sampling(0.5, 3), [1])
    sampler.set(2, Sampling(host=LogitsProcessorList([Bad(None)])), [1])
    logits = torch.randn(2, VOCABULARY)
    for rows, waits in (([0, 1], False), ([0, 2], True), ([-1, -1], False), ([2, 0], True)):
        rows, asked = np.array(rows), []
        assert sampler.waits(rows) is waits
        sampler.draw(logits, torch.from_numpy(rows), rows, lambda row, to=asked: to.append(row) or [1])
        assert asked == [2] * waits
    with pytest.raises(ValueError, match=r"rows \[2\] have processors"):
        sampler.draw(logits, torch.tensor([2, 0]), np.array([2, 0]))
    with pytest.raises(ValueError, match="logits of 98 tokens"):
        sampler.draw(logits[:, 1:], torch.tensor([2, 0]), np.array([2, 0]))
    sampler.clear(2)
    assert not sampler.waits(np.array([2, 0])) and sampler.variant(np.array([0])) == (True, False, False)
    assert sampler.variant(np.array([2, -1])) == (False, False, False)
    sampler.set(1, Sampling(0.5, 0, 0.9, penalty=2.0), [1])
    assert sampler.variant(np.array([0, 1])) == (True, True, True)


def test_the_table_stays_where_it_is():
    """Graphs hold its addresses. Tokens beyond the logits, such as 200, never come."""
    sampler = Sampler(7, VOCABULARY, "cpu")
    sampler.set(0, Sampling(penalty=2.0), [1])
    before = [t.data_ptr() for t in sampler._table]
    assert all(t.is_contiguous() for t in sampler._table)
    starts = [t.data_ptr() - sampler._store.data_ptr() for t in sampler._table[:7]]
    assert sorted(starts)[0] == 0 and not any(start % 16 for start in starts)
    sampler.warm_up(torch.zeros(3, VOCABULARY), ((False, False), (True, False), (True, True)))
    assert not sampler._table.drawn.any()
    for row in range(7):
        sampler.set(row, Sampling(row / 10, row, 1 - row / 10, row / 20, 1 + row, seed=-row), [row, 200], row * 2**33)
    sampler.flush()
    assert [t.data_ptr() for t in sampler._table] == before
    number = torch.arange(7)
    wanted = (number / 10, number, 1 - number / 10, number / 20, 1.0 + number, -number, number * 2**33, number * 0)
    for found, expected in zip(sampler._table[:8], wanted, strict=True):
        torch.testing.assert_close(found[:7], expected.to(found.dtype))
    seen = np.stack([bits_of([row] if row else [], VOCABULARY) for row in range(7)])
    assert sampler._table.seen is not None and torch.equal(sampler._table.seen[:7], torch.from_numpy(seen))


def test_the_first_draw_with_filters_waits_for_its_kernels():
    """And goes on where compiling failed: what is wrong shows in the launch."""
    sampler, waited = Sampler(4, VOCABULARY, "cpu"), []

    def wait():
        waited.append(1)
        raise RuntimeError("does not compile")

    sampler._filters = SimpleNamespace(wait=wait)
    logits, row = torch.zeros(1, VOCABULARY), torch.zeros(1, dtype=torch.int64)
    for sampling, so_far in ((Sampling(), 0), (Sampling(1.0, top_k=2), 1), (Sampling(1.0, top_k=2), 1)):
        sampler.set(0, sampling, [1])
        assert sampler.draw(logits, row, row.numpy())[0].shape == (1,) and len(waited) == so_far
