"""What one call of generate_batch does to the next, and what the report tells of it."""

import copy

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel

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
