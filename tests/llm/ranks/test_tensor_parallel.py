"""Models that transformers has divided among ranks: the tokens of one process, by this rank's part of every layer."""

import copy

import pytest
import torch
from transformers.distributed import DistributedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import accel
from accel.tolerances import DRIFT, LOGITS
from support.llm import families
from support.llm.parallel import ranks
from support.llm.runtime.deep import model_of

STEPS = 6
# All sums are ours: one for attention and MLP of each layer in a forward, and one for the words where they are divided.
TWO = (
    "llama", "llama-biases", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3", "gpt-neox", "starcoder2", "phi",
    "mixtral", "qwen3-moe",
)  # fmt: skip
# Gathered and split again between two linears, as their plans ask for: those run as transformers has them.
GATHERED = ("phi3", "olmo2", "gpt-oss")
FOUR = ("llama-mha", "gpt-neox")
SCHEMES = (
    ("llama", "int8"), ("llama-biases", "int8-asym"), ("qwen3", "fp8"), ("llama", "int4-g32"), ("mixtral", "int8"),
)  # fmt: skip
WIDE = {"hidden_size": 128, "intermediate_size": 128}  # groups of 32 columns fit into halves
# Whole experts on each rank, as transformers since 5.18 and before is asked for them.
EXPERTS = {"ep_size": 2} if "ep_size" in DistributedConfig.__annotations__ else {"enable_expert_parallel": True}


def call() -> dict:
    ids, mask = families.padded((9, 5))
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": STEPS, "do_sample": False}


@pytest.fixture
def saved(saved_model):
    def save(name: str, **changes):
        folder, model = saved_model(name, **changes)
        attention = families.BY_NAME[name].attention
        return model, folder, {"attn_implementation": attention} if attention else {}

    return save


def expect(found: list[dict], tokens: list, stock: list | None = None) -> None:
    for one in found:
        assert one["optimized"] == [tokens]
        assert one["stock"] == [tokens if stock is None else stock]
        assert one["fallbacks"] == [] and one["restored"]


def sums(model) -> int:
    """All-reduces of a forward of ours, where both ends of each layer are divided and the words are too."""
    return 2 * model.config.get_text_config().num_hidden_layers + 1


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_write_the_tokens_of_one_process(name, rank_pool, saved):
    model, folder, given = saved(name)
    found = rank_pool(2).run(ranks.write, folder, [call()], {}, {"tp_size": 2}, given)
    expect(found, model.generate(**call()).tolist())
    rules = {(path, rule, status) for path, rule, status, _ in found[0]["sites"]}
    for layer in families.layers(model):
        assert (layer, "decoder layer", "patched") in rules
    assert not [row for row in found[0]["sites"] if row[2] == "skipped"]
    collectives = found[0]["collectives"][1]
    assert collectives["all_gather_into_tensor"] == STEPS  # logits of words that are divided
    words = sum(rule == "word embeddings" for _, rule, _, _ in found[0]["sites"])
    assert collectives["all_reduce"] == STEPS * (sums(model) - 1 + words)


@pytest.mark.parametrize("name", GATHERED)
def test_linears_that_are_gathered_are_called_as_transformers_has_them(name, rank_pool, saved):
    model, folder, given = saved(name)
    found = rank_pool(2).run(ranks.write, folder, [call()], {}, {"tp_size": 2}, given)
    expect(found, model.generate(**call()).tolist())
    assert ("", "language model", "patched") in {row[:3] for row in found[0]["sites"]}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(name, rank_pool, saved):
    model, folder, given = saved(name)
    expect(
        rank_pool(4).run(ranks.write, folder, [call()], {}, {"tp_size": 4}, given), model.generate(**call()).tolist()
    )


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_whole_experts_on_each_rank(name, rank_pool, saved):
    model, folder, given = saved(name)
    found = rank_pool(2).run(ranks.write, folder, [call()], {}, {"tp_size": 2} | EXPERTS, given)
    expect(found, model.generate(**call()).tolist())
    assert [row[2] for row in found[0]["sites"] if row[1] == "experts"] == ["patched"] * 2


@pytest.mark.parametrize(("name", "scheme"), SCHEMES)
def test_rounded_weights_are_those_of_one_process(name, scheme, rank_pool, saved):
    model, folder, given = saved(name, **WIDE)
    stock = model.generate(**call()).tolist()
    one = accel.optimize(copy.deepcopy(model), weights=scheme)
    found = rank_pool(2).run(ranks.write, folder, [call()], {"weights": scheme}, {"tp_size": 2}, given)
    tokens = one.generate(**call()).tolist()
    expect(found, tokens, stock)
    rounded = [row[0] for row in found[0]["sites"] if row[1] == "weights" and row[2] == "patched"]
    matrices = sum(type(module) in (torch.nn.Linear, MixtralExperts) for module in model.modules())
    assert len(rounded) == matrices - 1  # all but the head


def test_rounded_keys_and_values(rank_pool, saved):
    model, folder, given = saved("llama")
    one = accel.optimize(copy.deepcopy(model), kv_cache="int8")
    found = rank_pool(2).run(ranks.write, folder, [call()], {"kv_cache": "int8"}, {"tp_size": 2}, given)
    expect(found, one.generate(**call()).tolist(), model.generate(**call()).tolist())
    assert "keys and values in int8" in found[0]["sites"][0][3]


def test_a_deep_model_whose_rounding_is_beyond_the_bound(rank_pool, tmp_path):
    """What each rank measures is the same to the bit, and so is what it does after."""
    model_of("llama", num_hidden_layers=10, vocab_size=families.EVEN_VOCAB).save_pretrained(tmp_path)
    found = rank_pool(2).run(ranks.trial, str(tmp_path), {"tp_size": 2}, (9, 1, 1, 3))
    assert found[0] == found[1] and ("", "language model", "patched") in {row[:3] for row in found[0]["sites"]}
    assert found[0]["off"] > LOGITS[torch.bfloat16] and 0 < found[0]["row"] <= DRIFT * found[0]["moves"]
