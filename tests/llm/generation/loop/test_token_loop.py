"""The loop that runs ahead of its tokens, on the host: token for token stock's.

On a CPU it takes stock's way by default; here it is let run there, over the same steps without graphs.
"""

import copy
import pickle

import pytest
import torch
from transformers import EosTokenCriteria, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

import accel
from accel.libraries.generation import predictable
from accel.llm.generation.loop import choice, handover
from accel.llm.generation.loop.hooks import LOOPING
from support.everything import always
from support.llm.calls import followed_by_numbers, gone_on, tokenizer
from support.llm.families import make, prompt
from support.llm.miniatures.mambas import MAMBAS
from support.llm.outputs import same

CALLS = {
    "greedy": {},
    "one row": {"lengths": (6,)},
    "a first token alone": {"lengths": (6,), "max_new_tokens": 1},
    "two": {"max_new_tokens": 2},
    "max_length": {"max_length": 15, "max_new_tokens": None},
    "rows that end": {"lengths": (7, 4, 5, 6), "eos_token_id": [5, 9, 11, 30, 41, 52, 63], "max_new_tokens": 40},
    "rows that end, drawn": {
        "lengths": (7, 4, 5, 6), "eos_token_id": [5, 9, 11, 30], "do_sample": True, "max_new_tokens": 40,
    },
    "one row that ends": {"lengths": (6,), "eos_token_id": list(range(3, 40)), "do_sample": True},
    "one row that ends, by numbers alone": {
        "lengths": (6,),
        "stopping_criteria": StoppingCriteriaList([EosTokenCriteria(torch.tensor(end)) for end in range(3, 40)]),
        "do_sample": True,
    },
    "min_new_tokens": {"eos_token_id": list(range(3, 70)), "min_new_tokens": 6, "do_sample": True},
    "min_length": {"eos_token_id": list(range(3, 70)), "min_length": 12},
    "drawn": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top_k": {"do_sample": True, "top_k": 7},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.7},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "typical_p": {"do_sample": True, "typical_p": 0.8},
    "penalty": {"repetition_penalty": 1.4},
    "all": {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "time": {"max_time": 1e6},
    "no time": {"max_time": 0.0},
    "forced": {"forced_eos_token_id": 2},
    "suppressed": {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [9]},
    "a cache to keep": {"return_dict_in_generate": True},
    "a prompt in parts": {"prefill_chunk_size": 3, "lengths": (7,)},
    "logits_to_keep": {"logits_to_keep": 0},
    "strings": {"stop_strings": ["zz", "A", "K", "a"], "tokenizer": "tokenizer", "do_sample": True},
}  # fmt: skip

NEW = 20  # tokens of a call


@pytest.mark.parametrize(
    "name", always(CALLS, "rows that end, drawn", "one row that ends", "one row that ends, by numbers alone", "all")
)
def test_token_for_token(name, pair_of, ran):
    ours, stock = pair_of("llama")
    call = {key: tokenizer() if value == "tokenizer" else value for key, value in CALLS[name].items()}
    wanted, fallbacks = followed_by_numbers(stock, **call), accel.report(ours).fallbacks
    same(followed_by_numbers(ours, **call), wanted)
    once = wanted["sequences"].shape[1] == max(call.get("lengths", (7,))) + 1
    assert ran[0] == (not once), "all behind the first token"
    assert accel.report(ours).fallbacks == fallbacks


@pytest.mark.parametrize("family", ["gpt2", "mistral", "mixtral", "bloom", "qwen3", "bamba", "falcon-h1"])
def test_families(family, pair_of, ran):
    ours, stock = pair_of(family)
    same(followed_by_numbers(ours, do_sample=True, top_k=9), followed_by_numbers(stock, do_sample=True, top_k=9))
    prepared = vars(ours)["forward"].convention.prepared
    assert ran[0] == predictable(ours, prepared)  # not Bloom of 5.17, which prepares its inputs itself
    assert ran[0] or family == "bloom"


def test_states_alone(ran):
    """Its class leaves the mask out of steps, which no layer of it reads."""
    stock = make(MAMBAS[0])
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    same(followed_by_numbers(ours), followed_by_numbers(stock))
    assert ran[0] == 1 and not accel.report(ours).fallbacks


def test_positions_of_several_parts_and_none(pair_of, ran):
    ours, stock = pair_of("llama")
    ids = prompt(2, 6)
    for model in (ours, stock):
        model.found = model.generate(ids, position_ids=torch.arange(3, 9)[None].expand(2, -1), max_new_tokens=9)
    assert torch.equal(ours.found, stock.found) and ran[0] == 1


def test_quantized_keys_and_values(ran):
    """The same as its own steps without the loop."""
    model = accel.optimize(make("llama"), kv_cache="int8")
    looped = followed_by_numbers(model, return_dict_in_generate=True)
    assert ran[0] == 1
    handover.DEVICES = ()  # put back by the fixture
    same(followed_by_numbers(model, return_dict_in_generate=True), looped)
    assert ran[0] == 1


def test_one_step_in_vain_at_most(pair_of, ran):
    """Where the end is no surprise, none."""
    ours, _ = pair_of("llama")
    followed_by_numbers(ours, (6,))
    assert ran[1] == NEW - 1
    words = followed_by_numbers(ours, (6,), do_sample=True)["sequences"][0].tolist()
    end = next(n for n in range(10, len(words)) if words[n] not in words[6:n])
    ran[1] = 0
    assert followed_by_numbers(ours, (6,), do_sample=True, eos_token_id=words[end])["sequences"].shape[1] == end + 1
    assert ran[1] == end - 6 + 1


def test_going_on_with_the_cache(pair_of, ran):
    found = []
    for model in pair_of("llama"):
        kept, cache = gone_on(model, NEW)
        cache.crop(-4)
        kept["logits"] = model(prompt(1, 2, 8), past_key_values=cache).logits
        found.append(kept)
    same(*found)
    assert ran[0] == 3


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores * 1.5


STATIC = {"cache_implementation": "static", "disable_compile": True}
STATIC_LENGTH = "_previous_max_cache_length"  # of a model that has made a static cache
ELSEWHERE = {
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "logits": {"output_logits": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "beams": {"num_beams": 2},
    "lookup": {"prompt_lookup_num_tokens": 2, "lengths": (7,)},
    "no cache": {"use_cache": False},
    "a static cache that is returned": STATIC | {"return_dict_in_generate": True},
    "a static cache and hidden states": STATIC | {"output_hidden_states": True},
    "a static cache and an argument": STATIC | {"token_type_ids": "ones"},
    "a processor": {"logits_processor": LogitsProcessorList([Own()])},
    "words": {"no_repeat_ngram_size": 3},
    "an argument": {"token_type_ids": "ones"},
    "another device": {},
}


@pytest.mark.parametrize(
    "name", always(ELSEWHERE, *(name for name in ELSEWHERE if "device" in name or "static" in name))
)
def test_stocks_own_loop(name, pair_of, twins, ran, monkeypatch):
    if name == "another device":
        monkeypatch.setattr(handover, "DEVICES", ())
    takes_types = "token_type_ids" in ELSEWHERE[name]
    ours, stock = pair_of("gpt2") if takes_types else twins()  # calls that fall back are counted
    call = {key: torch.ones(2, 7).long() if value == "ones" else value for key, value in ELSEWHERE[name].items()}
    same(followed_by_numbers(ours, **call), followed_by_numbers(stock, **call))
    assert ran == [0, 0]
    assert vars(ours).get(STATIC_LENGTH) == vars(stock).get(STATIC_LENGTH)


@pytest.mark.parametrize("drawn", [False, True])
def test_in_place_of_a_static_cache_that_nobody_sees(drawn, twins, ran):
    """Stock compiles the forward for one; graphs need none."""
    ours, stock = twins()
    same(followed_by_numbers(ours, do_sample=drawn, **STATIC), followed_by_numbers(stock, do_sample=drawn, **STATIC))
    assert ran[0] == 1 and not accel.report(ours).fallbacks
    assert STATIC_LENGTH in vars(stock) and STATIC_LENGTH not in vars(ours)


def test_a_static_cache_of_a_model_that_stock_does_not_compile(pair_of, ran):
    """GPT-Neo's tokens are others with it."""
    ours, stock = pair_of("gpt-neo")
    found = followed_by_numbers(stock, **STATIC)
    same(followed_by_numbers(ours, **STATIC), found)
    assert ran == [0, 0] and not torch.equal(found["sequences"], followed_by_numbers(stock)["sequences"])


def test_a_decoding_method_of_the_users_own(pair_of, ran):
    """It may ask the model what stock's loop asks, and is never taken for it."""

    def own(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        ended = torch.tensor(False)
        while model._has_unfinished_sequences(bool(ended.all()), False, device=input_ids.device):
            input_ids = torch.cat([input_ids, input_ids[:, :1]], 1)
            ended = stopping_criteria(input_ids, None)
        return input_ids

    ours, stock = pair_of("llama")
    found = [model.generate(prompt(2, 4), max_new_tokens=5, custom_generate=own) for model in (ours, stock)]
    assert torch.equal(*found) and ran == [0, 0]


def test_a_stock_loop_of_another_kind(twins, ran, monkeypatch):
    """One that returns another tensor than the one it shows is left alone; and one that was replaced."""
    from transformers import GenerationMixin

    tries, stock = handover.returns_what_criteria_saw.__wrapped__, GenerationMixin._sample
    assert tries()
    wanted = followed_by_numbers(twins()[1])
    monkeypatch.setattr(GenerationMixin, "_sample", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    assert tries()
    same(followed_by_numbers(twins()[0]), wanted)
    assert ran == [0, 0]
    monkeypatch.setattr(GenerationMixin, "_sample", lambda self, ids, *args, **kwargs: ids)
    assert not tries()
    monkeypatch.undo()
    monkeypatch.setattr(handover, "DEVICES", ("cpu",))
    monkeypatch.setattr(handover, "returns_what_criteria_saw", lambda: False)
    same(followed_by_numbers(twins()[0]), wanted)
    assert ran == [0, 0]


def test_restored_pickled_and_copied(ran):
    stock = make("llama")
    before = set(vars(stock))
    model = accel.optimize(copy.deepcopy(stock))
    assert all(name in vars(model) for name in LOOPING)
    wanted = followed_by_numbers(stock)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ran[0] = 0
        same(followed_by_numbers(again), wanted)
        assert ran[0] == 1 and vars(again)[next(iter(LOOPING))].module is again
    accel.restore(model)
    assert set(vars(model)) == before
    same(followed_by_numbers(model), wanted)
    assert ran[0] == 1


def test_drawing_is_the_largest_quotient():
    """What `draw` computes on a GPU is what torch.multinomial does, here from the same exponential numbers."""
    torch.manual_seed(0)
    probabilities = torch.randn(3, 50).softmax(-1)
    found = []
    for draw in (lambda: torch.multinomial(probabilities, 1).squeeze(1), lambda: choice._race(probabilities, None)):
        torch.manual_seed(5)
        found.append(torch.stack([draw() for _ in range(20)]))
    assert torch.equal(*found)
    assert choice.draws_as_torch(torch.device("cpu"))
