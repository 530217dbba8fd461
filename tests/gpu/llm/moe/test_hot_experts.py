"""Experts that kernels read from pinned memory, the hottest of them from the card: results equal to the bit.

python -m pytest tests/gpu/llm/moe/test_hot_experts.py -q
"""

import copy

import pytest
import torch

import accel
from accel.offload.blocks import sizes_of
from accel.offload.budget import SLACK
from accel.offload.call_hooks import streamed_model

ROOM = 2**28  # bytes for calls
SIZES = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 4, "head_dim": 64, "moe_intermediate_size": 384},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64, "intermediate_size": 512},
}


def build(kind, layers=6):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048}
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, **sizes, **SIZES[kind])
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        return model, torch.randint(0, 2048, (1, 70))


def call(model, ids, new=40):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, eos_token_id=2049, **given)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("qwen3_moe", "int4"), ("qwen3_moe", None), ("qwen3_moe", "int8"), ("gpt_oss", "int4"), ("gpt_oss", None)],
)
@torch.no_grad()
def test_experts_are_read_from_pinned_memory(kind, weights):
    model, ids = build(kind)
    twin = accel.optimize(copy.deepcopy(model), weights=weights)
    wanted = [call(twin, ids) for _ in range(3)][-1]
    sizes = sizes_of(twin)
    assert sizes.experts == (64 if kind == "qwen3_moe" else 32) and len(sizes.blocks) == 6
    before = {name: one.clone() for name, one in model.state_dict().items()}
    cap = sizes.least() + sum(sizes.blocks) // 3 + SLACK + ROOM
    accel.optimize(model, weights=weights, memory=cap)
    for _ in range(4):
        assert torch.equal(call(model, ids), wanted)
    held = streamed_model(model)
    assert 0 < held.copies < sizes.experts and held.on_card < cap
    assert 0.2 < held.hot.share() < 1.0
    assert not accel.report(model).fallbacks
    graphs = [row for row in accel.report(model).graphs if row["status"] == "graph"]
    assert graphs, accel.report(model).graphs
    told = [why for _, rule, _, why in accel.report(model).sites if rule == "memory"]
    assert f"{held.copies} of {sizes.experts} experts on the card" in told[-1]
    held.hot.exchange()
    assert torch.equal(call(model, ids[:, :1]), call(twin, ids[:, :1]))
    accel.restore(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {one.device.type for one in model.parameters()} == {"cuda"}


@torch.no_grad()
def test_what_routing_chooses_comes_to_the_card():
    """Texts of one token choose the same few again and again."""
    model, ids = build("qwen3_moe")
    sizes = sizes_of(accel.optimize(copy.deepcopy(model)))
    accel.optimize(model, memory=sizes.least() + sum(sizes.blocks) // 4 + SLACK + ROOM)
    same = ids[:, :1].expand(1, 70).contiguous()
    for _ in range(4):
        call(model, same, 24)
    held = streamed_model(model)
    held.hot.reads.zero_()
    call(model, same, 24)
    assert held.hot.share() > 1.5 * held.copies / sizes.experts
