"""What is asked for, in a generation configuration or by a request, as settings and seeds."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from accel.llm.batching.sampling import Sampling, SamplingDefaults, split_chain

PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=2)).eval()


def defaults(model, seed=None, **config):
    return SamplingDefaults(model, GenerationConfig(**config), ContinuousBatchingConfig(seed=seed))


def plain(sampling):
    """Without its seed and what is on the host."""
    return sampling._replace(seed=0, host=None)


def names(sampling):
    return [type(one).__name__ for one in sampling.host or ()]


ALL = {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.1}
OWN = GenerationConfig(repetition_penalty=1.2)
DRAWN = GenerationConfig(do_sample=True, top_k=4)
# A configuration, what a request asks for, its settings on the GPU, and what is left for the host.
CHOSEN = [
    ({}, {}, Sampling(), []),
    ({"repetition_penalty": 1.3}, {}, Sampling(penalty=1.3), []),
    ({"do_sample": True}, {}, Sampling(1.0), []),
    ({"do_sample": True, "top_k": 0, "top_p": 1.0}, {}, Sampling(1.0), []),
    (ALL | {"top_p": 0.9, "min_p": 0.1}, {}, Sampling(0.7, 5, 0.9, 0.1, 1.1), []),
    ({"do_sample": True, "top_k": 7, "renormalize_logits": True}, {}, Sampling(1.0, 7), []),
    ({"no_repeat_ngram_size": 2}, {}, Sampling(), ["NoRepeatNGramLogitsProcessor"]),
    # All that stands before one that only the host can run is run there too, in its order.
    (
        ALL | {"no_repeat_ngram_size": 2},
        {},
        Sampling(0.7, 5),
        ["RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"],
    ),
    (
        ALL | {"top_h": 0.4},
        {"repetition_penalty": 1},
        Sampling(1.0, 5),
        ["TemperatureLogitsWarper", "TopHLogitsWarper"],
    ),
    (
        {"do_sample": True, "top_k": 3, "typical_p": 0.9, "renormalize_logits": True},
        {},
        Sampling(1.0),
        ["TopKLogitsWarper", "TypicalLogitsWarper"],
    ),
    # A request goes before the configuration, and may have one of its own.
    (ALL, {"temperature": 2, "top_p": np.float32(0.5)}, Sampling(2.0, 5, 0.5, penalty=1.1), []),
    (ALL, {"top_k": 0, "min_p": 0.3, "repetition_penalty": 1}, Sampling(0.7, min_p=0.3), []),
    (ALL, {"do_sample": False}, Sampling(penalty=1.1), []),
    (ALL, {"top_k": 2**40}, Sampling(0.7, 2**31 - 1, penalty=1.1), []),
    ({}, {"do_sample": True, "top_k": np.int64(3), "seed": 4}, Sampling(1.0, 3), []),
    (ALL, {"generation_config": OWN}, Sampling(penalty=1.2), []),
    (ALL, {"generation_config": DRAWN, "top_p": 0.5}, Sampling(1.0, 4, 0.5), []),
]


@pytest.mark.share(1)
@pytest.mark.parametrize(("config", "given", "expected", "host"), CHOSEN, ids=str)
def test_processors_become_settings(model, config, given, expected, host):
    every = defaults(model, **config)
    usual = plain(every.request(PROMPT))
    found = every.request(PROMPT, **given)
    assert plain(found) == expected and names(found) == host and found.greedy is (expected.temperature == 0)
    assert plain(every.request(PROMPT)) == usual and DRAWN.top_p is None  # nothing is left behind


class Mine(TemperatureLogitsWarper):
    pass


def test_only_exact_types_in_transformers_order_go_to_the_gpu():
    for one in (
        Mine(0.5),
        TopKLogitsWarper(3, filter_value=-5.0),
        TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        MinPLogitsWarper(0.1, min_tokens_to_keep=2),
        RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2),
    ):
        assert split_chain([one], True) == Sampling(1.0, host=LogitsProcessorList([one]))
    chain = [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]
    assert split_chain(chain, True) == Sampling(0.5, 3, host=LogitsProcessorList(chain[:1]))
    twice = [TopKLogitsWarper(5), TopKLogitsWarper(3)]
    assert split_chain(twice, True) == Sampling(1.0, 3, host=LogitsProcessorList(twice[:1]))
    greedy = [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.5)]
    assert split_chain(greedy, False) == Sampling(host=LogitsProcessorList(greedy))
    ngram = [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=0)]
    assert split_chain(ngram, False) == Sampling(penalty=1.2, host=LogitsProcessorList(ngram[:1]))


BAD = [
    ({"temperature": 0.0}, ValueError, "temperature=0.0.*above 0.*do_sample=False"),
    ({"temperature": -1}, ValueError, "temperature=-1"),
    ({"temperature": math.inf}, ValueError, "temperature=inf"),
    ({"temperature": math.nan}, ValueError, "temperature=nan"),
    ({"temperature": "hot"}, TypeError, "temperature='hot'.*str.*number above 0"),
    ({"temperature": True}, TypeError, "temperature=True.*bool"),
    ({"temperature": None}, TypeError, "temperature=None"),
    ({"top_k": -1}, ValueError, "top_k=-1.*whole number"),
    ({"top_k": 2.5}, TypeError, "top_k=2.5"),
    ({"top_p": 1.5}, ValueError, r"top_p=1.5.*0 to 1"),
    ({"min_p": -0.1}, ValueError, r"min_p=-0.1.*0 to 1"),
    ({"repetition_penalty": 0}, ValueError, "repetition_penalty=0 "),
    ({"do_sample": 1}, TypeError, "do_sample=1.*True or False"),
    ({"seed": 2**64}, ValueError, "seed=18446744073709551616"),
    ({"seed": 1.0}, TypeError, "seed=1.0"),
    ({"tempreature": 1.0, "best_of": 2}, ValueError, "best_of, tempreature; known are do_sample, temperature, top_k"),
    ({"do_sample": False, "top_k": 4}, ValueError, "top_k=4.*do_sample=True"),
]


REFUSED = [
    ({}, {"top_p": 0.9}, ValueError, r"top_p=0\.9.*do_sample=True"),
    ({"guidance_scale": 1.5}, {}, ValueError, "guidance_scale"),
    ({"num_beams": 3}, {}, ValueError, "num_beams=3"),
    ({"do_sample": True, "temperature": -2.0}, {}, ValueError, "temperature"),  # transformers' own
    ({"seed": "x"}, {}, TypeError, "seed"),
]


@pytest.mark.parametrize(
    ("config", "given", "error", "words"), [*(({"do_sample": True}, *row) for row in BAD), *REFUSED]
)
@pytest.mark.share(2)
def test_what_is_not_valid_is_named(model, config, given, error, words):
    with pytest.raises(error, match=words):
        defaults(model, **config).request(PROMPT, **given)


def test_what_stock_ignores_is_ignored_with_a_warning(model, caplog):
    found = defaults(model, do_sample=True).request(PROMPT, min_tokens_to_keep=3)
    assert plain(found) == Sampling(1.0) and "min_tokens_to_keep=3" in caplog.text


def test_seeds(model):
    def seeds(every, count=3, **given):
        return [every.request(PROMPT, **given).seed for _ in range(count)]

    torch.manual_seed(11)
    assert defaults(model, repetition_penalty=1.2).request(PROMPT).greedy  # which draws no number
    assert defaults(model, 5, do_sample=True).request(PROMPT)
    first = seeds(defaults(model, do_sample=True))
    later = torch.rand(1)
    torch.manual_seed(11)
    assert seeds(defaults(model, do_sample=True)) == first and len(set(first)) == 3
    assert torch.equal(torch.rand(1), later)
    assert seeds(defaults(model, do_sample=True)) != first
    fixed = seeds(defaults(model, 3, do_sample=True))
    assert fixed == seeds(defaults(model, 3, do_sample=True)) != seeds(defaults(model, 4, do_sample=True))
    mine = defaults(model, 3, do_sample=True)
    assert [mine.request(PROMPT, seed=seed).seed for seed in (0, -1, 2**64 - 1)] == [0, -1, -1]
    assert all(-(2**63) <= seed < 2**63 for seed in first + fixed)


def test_a_fork_has_a_seed_and_processors_of_its_own(model):
    watermark = {"greenlist_ratio": 0.5, "bias": 2.0}
    parent = defaults(model, 1, do_sample=True, watermarking_config=watermark).request(PROMPT)
    children = [parent.fork(number) for number in range(3)]
    assert len({parent.seed, *(child.seed for child in children)}) == 4
    assert children == [child._replace(host=parent.host) for child in children] or all(
        child.host is not parent.host and names(child) == names(parent) for child in children
    )
    assert parent.fork(1).seed == children[1].seed
    again = defaults(model, parent.seed, do_sample=True)
    assert {again.request(PROMPT).seed for _ in range(3)}.isdisjoint(child.seed for child in children)
