"""Experts that kernels read from pinned memory, the hottest of them from the card: each layer gives what it gives
without a budget, to the bit. Logits of the model are as near to the truth as stock's, and may be others than without a
budget: a prompt in a graph is filled up to more rows, which other kernels multiply.

python -m pytest tests/gpu/llm/moe/test_hot_experts.py -q
"""

import copy
import gc
import time

import pytest
import torch
from accel_kernels.capture import capture
from accel_kernels.moe.chooser import ExpertsChooser, itemsize_of, likely_way
from transformers import DynamicCache

import accel
from accel.bench.memory import allocated_bytes
from accel.offload import hot_experts
from accel.offload.blocks import sizes_of
from accel.offload.budget import SLACK
from accel.offload.call_hooks import streamed_model
from accel.offload.streamed_model import StreamedModel
from support.llm.quantized import rounded

pytestmark = pytest.mark.usefixtures("exact")

CARD = torch.device("cuda", 0)
ROOM = 2**23  # bytes for calls: these models are small
PROMPT = 70  # tokens
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
    for name, one in model.named_parameters():
        if name.endswith(("bias", "sinks")):  # else zeros
            one.data.normal_(std=0.02)
        if one.dim() == 3:  # so that an expert in the place of another shows
            one.data *= 2
    return model


def call(model, ids, new=40):
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, eos_token_id=2049, **given)


def within(model, share, **options):
    """Tokens, stock models over the same weights in float32 and in 16 bits, sizes, and a budget for this share of the
    experts; the model is on the CPU then.
    """
    ids = torch.randint(0, 2048, (1, PROMPT + 40), generator=torch.Generator().manual_seed(1)).cuda()
    twin = accel.optimize(copy.deepcopy(model), **options)
    stock, sizes = [rounded(model, twin, dtype) for dtype in (torch.float32, torch.bfloat16)], sizes_of(twin)
    del twin
    model.cpu()
    gc.collect()
    cap = allocated_bytes(CARD) + sizes.least() + int(share * sum(sizes.blocks)) + SLACK + ROOM
    return ids, stock, sizes, cap


def in_steps(model, ids):
    """Logits of the last tokens, all but the first in a call of their own."""
    cache, (prompt, *rest) = DynamicCache(config=model.config), ids.split([PROMPT] + [1] * (ids.shape[1] - PROMPT), 1)
    found = [model(prompt, past_key_values=cache, logits_to_keep=1).logits]
    return torch.cat([*found, *(model(one, past_key_values=cache).logits for one in rest)], 1)


def assert_as_near(model, stock, ids):
    """To the truth, of the median token: where rounding sends one to other experts, logits have little in common."""
    exact, theirs = (one(ids).logits[0, PROMPT - 1 :] for one in stock)
    allowed, off = ((one - exact).abs().amax(1).median() for one in (theirs, in_steps(model, ids)[0]))
    assert off <= 2 * allowed < 0.1 * exact.abs().amax(), (off, allowed, accel.report(model))


KINDS = [("qwen3_moe", "int4"), ("qwen3_moe", None), ("qwen3_moe", "int8"), ("gpt_oss", "int4"), ("gpt_oss", None)]


def for_copies(held):
    """Room for a third of the experts, however much calls need."""
    return held.sizes.on_card(tuple(range(6)), held.sizes.experts // 3) + 4096


def no_races(monkeypatch):
    """Which may end otherwise for the twin."""

    def likely(self, x, index, weights):
        return likely_way(*index.shape, weights.experts, itemsize_of(x.dtype, weights))

    monkeypatch.setattr(ExpertsChooser, "choose", likely)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@torch.no_grad()
def test_layers_alone(kind, weights, monkeypatch):
    """Of few rows and of many, with none of the experts on the card and with some; and a graph of a row, while others
    come to the card.
    """
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
    monkeypatch.setattr(held, "_place", lambda: None)  # no call chooses anew what is on the card
    layers = [(model.model.layers[i].mlp.experts, twin.model.layers[i].mlp.experts) for i in range(6)]
    for copies in (0, experts // 4):
        held.bring_back()
        held._bring(tuple(range(6)), copies)
        for turn, given in enumerate((*inputs, *inputs)):
            for i, (ours, theirs) in enumerate(layers):
                got, wanted = ours(*given), theirs(*given)
                assert torch.equal(got, wanted), (copies, turn, i, float((got - wanted).abs().max()))
            if turn == 4:
                held.hot.exchange()
        assert held.copies == copies and not accel.report(model).fallbacks, accel.report(model)
        graph, wanted = torch.cuda.CUDAGraph(), [theirs(*inputs[0]) for _, theirs in layers]
        with held.one_call(), capture(graph):  # a call begins by waiting for the one before it
            outputs = [ours(*inputs[0]) for ours, _ in layers]
        slots = held.hot.slots.clone()
        for turn in range(6):
            graph.replay()
            assert all(map(torch.equal, outputs, wanted)), (copies, turn)
            held.hot.exchange()
        assert not copies or not torch.equal(held.hot.slots, slots)


@pytest.mark.parametrize(("kind", "weights"), KINDS)
@torch.no_grad()
def test_experts_are_read_from_pinned_memory(kind, weights, monkeypatch):
    no_races(monkeypatch)
    model = build(kind)
    ids, stock, sizes, cap = within(model, 0.4, weights=weights)
    assert sizes.experts == (64 if kind == "qwen3_moe" else 32) and len(sizes.blocks) == 6
    before = {name: one.clone() for name, one in model.state_dict().items()}
    monkeypatch.setattr(StreamedModel, "room", for_copies)
    accel.optimize(model, weights=weights, memory=cap)
    held = streamed_model(model)
    for turn in range(4):
        call(model, ids[:, :PROMPT])
        assert_as_near(model, stock, ids)
        if turn == 2:  # to where they were: no graph reads the tables of before
            held.bring_back()
            held._bring(held.streamed, held.copies)
    assert 0 < held.copies < sizes.experts and held.on_card < cap, (held.measured, held.outside, cap, sizes)
    assert 0.1 < held.hot.share() < 1.0
    assert not accel.report(model).fallbacks
    assert any(row["status"] == "graph" for row in accel.report(model).graphs), accel.report(model).graphs
    told = [why for _, rule, _, why in accel.report(model).sites if rule == "memory"]
    assert f"{held.copies} of {sizes.experts} experts on the card" in told[-1]
    held.hot.exchange()
    loaded = {name: one.cpu() for name, one in model.state_dict().items()}
    model.load_state_dict(loaded)
    assert all(torch.equal(one.cpu(), loaded[name]) for name, one in model.state_dict().items())
    assert_as_near(model, stock, ids)
    accel.restore(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {one.device.type for one in model.parameters()} == {"cpu"}


@torch.no_grad()
def test_what_routing_chooses_comes_to_the_card():
    """Texts of one token choose the same few again and again."""
    model = build("qwen3_moe")
    ids, stock, sizes, cap = within(model, 0.25)  # the budget counts stock's models, which stay so long
    accel.optimize(model, memory=cap)
    same = ids[:, :1].expand(1, PROMPT).contiguous()
    for _ in range(4):
        call(model, same, 24)
    held = streamed_model(model)
    held.tables.reads.zero_()
    call(model, same, 24)
    assert stock and held.hot.share() > 1.5 * held.copies / sizes.experts


@pytest.mark.parametrize("rows", [8, 32])
@torch.no_grad()
def test_steps_of_many_rows_read_experts_where_they_are(rows, monkeypatch, capsys):
    """As layers that stream as a whole do, and sooner: their bytes are those of experts that are not on the card."""
    no_races(monkeypatch)
    model = build("qwen3_moe")
    ids, stock, _, cap = within(model, 0.4)
    ids, took, texts = ids[:, :16].repeat(rows, 1), {}, {}
    ids[:, :8] = torch.randint(0, 2048, (rows, 8), generator=torch.Generator().manual_seed(2)).cuda()
    accel.optimize(model, memory=cap + 2**27)
    for pairs in (1, 4, 1, 4):
        monkeypatch.setattr(hot_experts, "PAIRS", pairs)
        accel.optimize(model, memory=cap + 2**27)  # its graphs are captured anew
        for _ in range(3):
            call(model, ids)
        torch.cuda.synchronize()
        started = time.perf_counter()
        texts[pairs] = call(model, ids)
        torch.cuda.synchronize()
        assert stock and streamed_model(model).hot is not None  # the budget counts what stock's models take
        took[pairs] = min(took.get(pairs, 1e9), time.perf_counter() - started)
    with capsys.disabled():
        print(f"{rows} rows: {took[1] * 1e3:.1f} ms a text by whole layers, {took[4] * 1e3:.1f} by experts in place")
    assert float((texts[1] == texts[4]).float().mean()) > 0.5  # sums are of another order, and texts part
    assert rows * 4 <= 64 or took[4] < took[1]
