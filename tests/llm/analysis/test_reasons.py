"""Models that are not fused, and that the report says why in words that are true of them."""

import copy

import pytest
import torch

import accel
from support.llm.families import SIZES, TOKENS, available, padded, randomize
from support.llm.outputs import generate, same

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
DECODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
CASES = {
    # A gate between attention and projection; and as many heads of keys as of queries, so that it could be keys itself.
    "afmoe": ({"head_dim": 16, "num_experts": 4, "num_dense_layers": 1, "num_key_value_heads": 4} | EXPERTS,
              "what its attention gives is changed before it is projected"),
    # Queries of experts, keys and values from one projection.
    "jetmoe": ({"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
               "no projection gives the values it stores, beside queries and keys in an order that is known"),
    "qwen3_next": ({"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "num_experts": 4,
                    "shared_expert_intermediate_size": 48, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                    "linear_key_head_dim": 16, "linear_value_head_dim": 16} | EXPERTS,
                   "its cache keeps more than keys and values"),
    # Linear attention beside softmax attention, in a cache class that no other is accepted for.
    "minimax": ({"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "num_local_experts": 4,
                 "num_experts_per_tok": 2}, "its forward refuses the examined call: ValueError: MiniMax uses cache"),
    "bert": ({"is_decoder": True}, "what its attention gives is projected outside of it"),
    "bart": (DECODER | {"is_decoder": True, "is_encoder_decoder": False},
             "steps after a prompt hang on how much the cache holds"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_the_reason_is_true(kind):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if not available(kind):
        pytest.skip(f"this transformers has no {kind}")
    config, words = CASES[kind]
    known = SIZES if kind != "bart" else {name: SIZES[name] for name in ("vocab_size", "max_position_embeddings")}
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(known | TOKENS | config))).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in stock.named_parameters():
        randomize(stock.get_submodule(name.rpartition(".")[0]), parameter.data, generator, 0.5)
    stock.generation_config.eos_token_id, stock.generation_config.pad_token_id = None, 0
    ours = accel.optimize(copy.deepcopy(stock))
    (reason,) = (reason for _, rule, _, reason in accel.report(ours).sites if rule == "language model")
    assert words in reason, reason
    ids, mask = padded()
    same(generate(ours, ids, mask), generate(stock, ids, mask))


def test_a_mask_made_of_the_text_is_told():
    from transformers import GitConfig, GitForCausalLM

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    model = GitForCausalLM(GitConfig(vision_config=vision | {"image_size": 16, "patch_size": 8}, **config, **TOKENS))
    accel.optimize(model.eval())
    (reason,) = (reason for _, rule, _, reason in accel.report(model).sites if rule == "language model")
    assert "its attention mask is made of more than positions" in reason
