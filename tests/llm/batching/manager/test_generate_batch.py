"""What one call of generate_batch does to the next, and what the report tells of it."""

import copy

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

import accel
from accel.llm.batching.request import was_cut
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
