"""Experts of a mixture of which the hottest are on the card, a piece of the host's memory."""

import copy
import ctypes
import weakref
from contextlib import nullcontext

import pytest
import torch
from accel_kernels.moe.weights import PLACE_BYTES
from transformers import AutoModelForCausalLM

import accel
from accel.bench.diffusion.streaming import in_fewer_bits, on_paper
from accel.cuda_graphs.fingerprint import Fingerprint
from accel.llm.generation.loop import handover
from accel.offload import hot_experts
from accel.offload.blocks import sizes_of
from accel.offload.call_hooks import streamed_model as streamed
from support.kernels.waiting import NothingWaits
from support.llm.calls import counting_loops
from support.llm.families import make, padded
from support.objects.streaming import same, stored

pytestmark = pytest.mark.usefixtures("streaming")


def mixture(name, weights):
    """Of experts, for a step of six rows too few to be worth streaming all."""
    changes = {"qwen3-moe": {"moe_intermediate_size": 128}, "gpt-oss": {"layer_types": None}}.get(name, {})
    model = make(name, num_hidden_layers=4, **changes).eval()
    ids, mask = (one.repeat(3, 1) for one in padded())
    call = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    return accel.optimize(model, weights=weights), lambda model: model.generate(ids, **call)


def test_a_plan_counts_the_experts_that_stay():
    twin, _ = mixture("qwen3-moe", "int4-g32")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin.config, dtype=torch.bfloat16)
    in_fewer_bits(model, "int4-g32")
    sizes, wanted = sizes_of(model), sizes_of(twin)  # whose scales are float32
    assert sizes.experts == 4 and sum(wanted.blocks) / 1.15 < sum(sizes.blocks) < sum(wanted.blocks)
    memory = (sizes.on_card(range(4), 1) + sizes.blocks[0] // 2) / 0.9
    row = on_paper(model, 1.0, None, int(memory), {"bus": 1.0, "rate": 1e12, "memory": 1e12})
    assert row["fits"] and row["experts"] == "1 of 4"  # of which a token takes two
    assert row["seconds"] == pytest.approx(0.5 * 0.75 * sum(sizes.blocks), rel=1e-3)


@pytest.mark.parametrize(("name", "weights"), [("qwen3-moe", "int4-g32"), ("mixtral", None), ("gpt-oss", None)])
@torch.no_grad()
@pytest.mark.turns(2)
def test_the_hottest_experts_are_on_the_card(name, weights, monkeypatch):
    """And every expert is where the table of places says."""
    twin, call = mixture(name, weights)
    model, sizes = accel.restore(copy.deepcopy(twin)), sizes_of(twin)
    wanted, before = call(twin), stored(model)
    monkeypatch.setattr(hot_experts, "EVERY", 3)
    monkeypatch.setattr(handover, "DEVICES", ("cpu",))  # steps one after another, between which nothing moves
    loops = counting_loops(monkeypatch)
    accel.optimize(model, weights=weights, memory=sizes.on_card(range(4), 1) + sizes.blocks[0] // 2)
    inner = stored(model)
    for inside in (torch.inference_mode(), nullcontext()):  # within the first call experts are chosen
        with inside:
            assert torch.equal(call(model), wanted)
        same(model, inner)
    held = streamed(model)
    assert loops[0] == 2 and held.caller == 0 and not held.lock.locked()
    hot = held.hot
    assert (held.copies, hot.experts) == (1, 4) and 0 < hot.share() < 1 and not accel.report(model).fallbacks
    told = [why for _, rule, _, why in accel.report(model).sites if rule == "memory"]
    assert "1 of 4 experts on the card, " in told[-1]
    for forward, places, slots in zip(held.stacks.values(), hot.places, hot.slots, strict=True):
        weights = forward.readable()
        for part, step, column in zip(weights.parts(), weights.steps(), places.t(), strict=True):
            for expert, place in enumerate(column.tolist() if part is not None else ()):
                own = part.data_ptr() + expert * step
                assert ctypes.string_at(own + place * PLACE_BYTES, step) == ctypes.string_at(own, step)
                assert (place != 0) == (expert in slots)
    stack = held.stacks[held.order[0]].readable().gate_up.data
    stack = min(stack, stack.mT, key=lambda one: one.stride(-1)).view(torch.uint8).data.bitwise_xor_(1)  # uncounted
    with held.one_call():
        assert torch.equal(hot._each(0, hot.seen[0])[0][hot.slots[0]], hot.copied[0][0])
    stack.bitwise_xor_(1)
    with NothingWaits():  # for a graph has all of it
        hot.follow(0, torch.zeros(3, 2, dtype=torch.int64), hot.seen[0])
        hot.exchange()
    captured, heat = Fingerprint(model), held.tables.hot()
    chosen = hot.slots, hot.home, hot.card
    del hot
    held.bring_back()
    held._bring(held.streamed, held.copies)  # to the same addresses, so that graphs are replayed, which read the tables
    assert captured.reachable() and all(map(torch.equal, heat, held.hot.heat)) and not held.tables.reads.any()
    assert [one.data_ptr() for one in held.hot.places] == [one.data_ptr() for one in held.tables.places]
    now = held.hot.slots, held.hot.home, held.hot.card
    assert all(one.data_ptr() == two.data_ptr() for one, two in zip(chosen, now, strict=True))
    reserve, old, there = type(held)._reserve, weakref.ref(held.addresses), []
    monkeypatch.setattr(type(held), "_reserve", lambda self, n: (there.append(old() is not None), reserve(self, n))[1])
    held.bring_back()
    held._bring(held.streamed, 0)
    assert there == [True]  # so that others are found
    accel.restore(model)
    same(model, before)
    assert all(one.held is None for one in held.stacks.values())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
