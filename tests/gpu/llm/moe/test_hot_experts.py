"""Experts that kernels read from pinned memory, the hottest of them from the card: results equal to the bit.

python -m pytest tests/gpu/llm/moe/test_hot_experts.py -q
"""

import copy

import pytest
import torch
from accel_kernels.moe.chooser import ExpertsChooser, itemsize_of, likely_way

import accel
from accel.bench.memory import allocated_bytes
from accel.offload.blocks import sizes_of
from accel.offload.budget import SLACK
from accel.offload.call_hooks import streamed_model

CARD = torch.device("cuda", 0)
ROOM = 2**23  # bytes for calls: these models are small
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
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def call(model, ids, new=40):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, eos_token_id=2049, **given)


def within(model, share, **options):
    """What the optimized model writes on the card, its sizes, and a budget for this share of the experts; the model is
    on the CPU then.
    """
    ids = torch.randint(0, 2048, (1, 70), generator=torch.Generator().manual_seed(1)).cuda()
    twin = accel.optimize(copy.deepcopy(model), **options)
    wanted = [[call(twin, one) for _ in range(3)][-1] for one in (ids, ids[:, :1])]
    sizes = sizes_of(twin)
    del twin
    model.cpu()
    cap = allocated_bytes(CARD) + sizes.least() + int(share * sum(sizes.blocks)) + SLACK + ROOM
    return ids, wanted, sizes, cap


KINDS = [("qwen3_moe", "int4"), ("qwen3_moe", None), ("qwen3_moe", "int8"), ("gpt_oss", "int4"), ("gpt_oss", None)]


def no_races(monkeypatch):
    """Which may end otherwise for the twin."""

    def likely(self, x, index, weights):
        return likely_way(*index.shape, weights.experts, itemsize_of(x.dtype, weights))

    monkeypatch.setattr(ExpertsChooser, "choose", likely)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@torch.no_grad()
def test_layers_alone(kind, weights, monkeypatch):
    """Of few rows and of many, with none of the experts on the card and with some."""
    no_races(monkeypatch)
    model = build(kind)
    twin, inputs = accel.optimize(copy.deepcopy(model), weights=weights), []
    experts, room = sizes_of(twin).experts, 2 * SLACK + ROOM
    for rows in (1, 3, experts // 4, 70):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        index = torch.rand(rows, experts, device="cuda").topk(4).indices
        inputs.append((x, index, torch.rand(rows, 4, device="cuda").bfloat16()))
    sizes, cap = sizes_of(twin), allocated_bytes(CARD) + room
    accel.optimize(model, weights=weights, memory=cap + sizes.least() + sum(sizes.blocks) // 2)
    held = streamed_model(model)
    for copies in (0, experts // 4):
        held.bring_back()
        held._bring(tuple(range(6)), copies)
        for turn, given in enumerate((*inputs, *inputs)):
            for i in range(6):
                got, wanted = (one.model.layers[i].mlp.experts(*given) for one in (model, twin))
                assert torch.equal(got, wanted), (copies, turn, i, float((got - wanted).abs().max()))
            if turn == 4:
                held.hot.exchange()


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@torch.no_grad()
def test_experts_are_read_from_pinned_memory(kind, weights, monkeypatch):
    no_races(monkeypatch)
    model = build(kind)
    ids, wanted, sizes, cap = within(model, 0.4, weights=weights)
    assert sizes.experts == (64 if kind == "qwen3_moe" else 32) and len(sizes.blocks) == 6
    before = {name: one.clone() for name, one in model.state_dict().items()}
    accel.optimize(model, weights=weights, memory=cap)
    for turn in range(4):
        got = call(model, ids)
        told = turn, streamed_model(model).copies, accel.report(model).fallbacks
        assert torch.equal(got, wanted[0]), (told, got[0, 70:], wanted[0][0, 70:])
    held = streamed_model(model)
    assert 0 < held.copies < sizes.experts and held.on_card < cap, (held.measured, held.outside, cap, sizes)
    assert 0.2 < held.hot.share() < 1.0
    assert not accel.report(model).fallbacks
    assert any(row["status"] == "graph" for row in accel.report(model).graphs), accel.report(model).graphs
    told = [why for _, rule, _, why in accel.report(model).sites if rule == "memory"]
    assert f"{held.copies} of {sizes.experts} experts on the card" in told[-1]
    held.hot.exchange()
    loaded = {name: one.cpu() for name, one in model.state_dict().items()}
    model.load_state_dict(loaded)
    assert all(torch.equal(one.cpu(), loaded[name]) for name, one in model.state_dict().items())
    assert torch.equal(call(model, ids[:, :1]), wanted[1])
    accel.restore(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {one.device.type for one in model.parameters()} == {"cpu"}


@torch.no_grad()
def test_what_routing_chooses_comes_to_the_card():
    """Texts of one token choose the same few again and again."""
    model = build("qwen3_moe")
    ids, _, sizes, cap = within(model, 0.25)
    accel.optimize(model, memory=cap)
    same = ids[:, :1].expand(1, 70).contiguous()
    for _ in range(4):
        call(model, same, 24)
    held = streamed_model(model)
    held.hot.reads.zero_()
    call(model, same, 24)
    assert held.hot.share() > 1.5 * held.copies / sizes.experts
