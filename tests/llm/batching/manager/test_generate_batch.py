"""One call of generate_batch after another, and answers that go on where they were begun elsewhere."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import accel
from accel.llm.batching.request import was_cut
from support.everything import always
from support.llm.families import make, prompt

CONFIG = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
PROMPTS = [[5, 6, 7], [9] * 9, [3, 4], [8] * 20]


def batch(model, prompts=None, **given):
    config = GenerationConfig(max_new_tokens=6, eos_token_id=-1, pad_token_id=0, **given)
    return model.generate_batch(
        PROMPTS if prompts is None else prompts, generation_config=config, continuous_batching_config=CONFIG
    )


def test_an_answer_hangs_on_its_place_and_on_no_other_prompt(pair_of):
    """Seeds go by the order of the inputs, also where prompts are sorted to be shared."""
    model, _ = pair_of("llama")

    def first(company):
        torch.manual_seed(3)
        outputs = batch(model, [[5, 6, 7], *company], do_sample=True)
        return outputs["req_0"].generated_tokens

    assert first([]) == first([[9] * 9, [8]]) == first([[1]] * 5)


def test_the_report_tells_of_the_pool(pair_of):
    model = accel.optimize(copy.deepcopy(pair_of("llama")[1]), cpu="fuse")
    assert accel.report(model).batching == [] and "batched" not in str(accel.report(model))
    batch(model)
    [row] = accel.report(model).batching
    assert row["path"] == "" and row["pages"] == 8 * 4 + 1 and row["requests"] == 4 and row["memory_mb"] > 0
    assert "MiB of keys and values" in str(accel.report(model)) and accel.report(model).to_dict()["batching"] == [row]


@pytest.mark.parametrize("alike", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_size_that_equals_the_longest_text_in_training_cuts_nothing(alike):
    """As in Llama-2-7B: hidden_size and max_position_embeddings are 4096."""
    stock = make("llama", max_position_embeddings=64, **{alike: 64})
    model = accel.optimize(copy.deepcopy(stock), cpu="fuse")
    ids = prompt(1, 60) % 64
    output = model.generate_batch(ids.tolist(), **new(20))["req_0"]
    wanted = stock.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=-1)[0, 60:]
    assert output.generated_tokens == wanted.tolist() and output.error is None
    assert not accel.report(model).fallbacks


def test_an_answer_that_is_cut_says_so():
    """The model has a table of 64 positions; an answer that needs no more than these is whole."""
    model = accel.optimize(make("gpt2", n_positions=64), cpu="fuse")
    whole, cut = (model.generate_batch([prompt(1, 60)[0].tolist()], **new(count))["req_0"] for count in (5, 20))
    assert whole.error is None and whole.status is RequestStatus.FINISHED
    assert cut.generated_tokens == whole.generated_tokens and len(cut.generated_tokens) == 5 and was_cut(cut)
    assert cut.error == "cut after 5 of max_new_tokens=20 tokens: a prompt of 60, where a request may come to 64"
    assert not accel.report(model).fallbacks


def new(tokens):
    config = GenerationConfig(max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
    return {"generation_config": config, "continuous_batching_config": CONFIG}


FOLDER = Path(__file__).parents[4] / "examples" / "models" / "tiny-lm"
TEXT, MOST = "It was a beautiful evening, and", 24


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def manager():
    model = accel.optimize(AutoModelForCausalLM.from_pretrained(FOLDER))
    made = model.init_continuous_batching(GenerationConfig(eos_token_id=-1), ContinuousBatchingConfig(num_blocks=4))
    made.start()
    yield made
    made.stop(hard_stop=True)
    made.destroy()


def settled(manager, *args, **given):
    """The last output of a request."""
    return manager.get_result(manager.add_request(*args, **given), timeout=60)


SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 5},
    "nucleus": {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.9, "seed": 2**63 + 1},
    "penalty": {"repetition_penalty": 1.3},
    "on the host": {
        "generation_config": GenerationConfig(no_repeat_ngram_size=2, min_new_tokens=20),
        "eos_token_id": 0,
    },
}


@pytest.mark.parametrize("name", always(SETTINGS, "penalty"))
@pytest.mark.turns(2)
def test_an_answer_goes_on_as_it_would_have(manager, tokenizer, name):
    prompt, given = tokenizer(TEXT).input_ids, SETTINGS[name]
    whole = settled(manager, prompt, max_new_tokens=MOST, **given).generated_tokens
    assert len(whole) == MOST
    for cut in (1, 7, MOST - 1):
        steps = manager.current_batch
        got = settled(manager, prompt, max_new_tokens=MOST, generated=whole[:cut], **given)
        assert got.generated_tokens == whole and got.prompt_ids == prompt
        assert manager.current_batch - steps <= MOST - cut + 1  # none of those before was drawn again


def test_what_was_begun_is_what_it_goes_on_behind(manager, tokenizer):
    """Tokens that this model would not have drawn, which stock reads as a part of the prompt; unless they are whole."""
    prompt, begun = tokenizer(TEXT).input_ids, tokenizer(" then the rain").input_ids
    behind = settled(manager, prompt + begun, max_new_tokens=3).generated_tokens
    name = manager.add_request(prompt, max_new_tokens=3 + len(begun), streaming=True, generated=begun)
    assert [one.generated_tokens for one in manager.request_id_iter(name)] == [begun + behind[:n] for n in (1, 2, 3)]
    most = manager.engine.limits.context
    for length, ends in ((2, {"max_new_tokens": 3}), (2, {"eos_token_id": [0, 44]}), (most - 2, {})):
        got = settled(manager, [5] * length, generated=[7, 8, 44], **ends)
        assert got.generated_tokens == [7, 8, 44] and got.status is RequestStatus.FINISHED and got.error is None


def test_what_no_answer_begins_with_fails_alone(manager, tokenizer):
    wrong = settled(manager, [5], max_new_tokens=3, generated=[7, len(tokenizer)])
    assert f"token {len(tokenizer)} is not one of the model's" in wrong.error
    manager.num_return_sequences = 2
    try:
        name = manager.add_request([5], max_new_tokens=3, generated=[7])
        both = [manager.get_result(timeout=60) for _ in range(2)]
    finally:
        manager.num_return_sequences = 1
    assert {one.request_id.partition("__")[0] for one in both} == {name}
    assert all("num_return_sequences=2 answers begin alike" in one.error for one in both)
