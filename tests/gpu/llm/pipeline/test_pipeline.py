"""Models spread over several cards by accelerate: stretches in graphs, stock's tokens, nothing waited for."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import accel
from accel.bench.llm.models import device_map
from accel.cuda_graphs.runner import GraphRunner
from accel.llm.generation.loop.token_loop import TokenLoop
from support.kernels.waiting import waits_noted
from support.llm.calls import counting, followed_by_numbers
from support.llm.families import layers, make, padded, prompt
from support.llm.gpu import CARDS, DEEP, forward_over, on_gpu, pair_over, stretches_replayed
from support.llm.modes import MODES
from support.llm.outputs import generate, ran_fast, same
from support.state import assert_same_state, snapshot

EXACT = 4e-5
OFF = 0.03  # of the norm of the logits, in bfloat16
LEFT = ("hidden-states", "attentions", "static", "no-cache", "early-exit")  # modes that run stock
NAMED = {mode.name: mode for mode in MODES}
FAMILIES = (*DEEP, "gpt2", "gemma3", "falcon-one-key")

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.skipif(not CARDS, reason="needs two cards"),
]


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_token_for_token(name, cards):
    ours, stock = pair_over(cards, name)
    cards = min(cards, len(layers(stock)))
    ids, mask = on_gpu(*padded((9, 5)))
    wanted = generate(stock, ids, mask, max_new_tokens=20)
    for _ in range(3):  # eager, captured, replayed
        same(generate(ours, ids, mask, max_new_tokens=20), wanted, EXACT)
    ran_fast(ours)
    forward = forward_over(ours)
    assert forward.chained and len(forward.stretches) == cards
    assert stretches_replayed(ours) == {one.path for one in forward.stretches}
    assert [one.device.index for one in forward.stretches] == list(range(len(forward.stretches)))


@pytest.mark.parametrize("name", ["greedy-padded", "sample-top", "beam", "beam-sample", "assisted", "prompt-lookup",
                                  "given-cache", "continued-padded", "streamer", "early-exit"])  # fmt: skip
def test_modes(name):
    ours, stock = pair_over(2)
    mode = NAMED[name]
    ids, mask = on_gpu(*padded(mode.lengths))
    wanted = mode(stock, ids, mask)
    for _ in range(3):
        same(mode(ours, ids, mask), wanted, EXACT)
    if name not in LEFT:
        ran_fast(ours)


def test_logits_in_bfloat16():
    ours, stock = pair_over(2, dtype=torch.bfloat16)
    ids = prompt(2, 30).cuda()

    def logits(model):
        cache, found = DynamicCache(config=model.config), []
        for start, end in ((0, 20), *itertools.pairwise(range(20, 31))):
            found.append(model(ids[:, start:end], past_key_values=cache, use_cache=True).logits.float())
        return torch.cat(found, 1)

    wanted = logits(stock)
    for _ in range(3):
        got = logits(ours)
        assert got.device == wanted.device
        assert float((got - wanted).norm() / wanted.norm()) < OFF
    assert len(stretches_replayed(ours)) == 2
    ran_fast(ours)


def test_the_loop_runs_ahead_by_replays(monkeypatch):
    ours, stock = pair_over(2)
    ran = counting(monkeypatch, (TokenLoop, "run", False), (GraphRunner, "begin", True))
    for call in ({}, {"lengths": (7, 4, 5), "do_sample": True}):
        for _ in range(3):
            followed_by_numbers(ours, **call)
        wanted = followed_by_numbers(stock, **call)
        ran[:] = 0, 0
        same(followed_by_numbers(ours, **call), wanted, EXACT)
        new = wanted["sequences"].shape[1] - max(call.get("lengths", (7,)))
        assert ran[0] == 1 and ran[1] >= 2 * (new - 2), (ran, new)


def test_a_step_waits_for_nothing():
    ours, _ = pair_over(2)
    ids, cache = prompt(2, 9).cuda(), DynamicCache(config=ours.config)
    ours(ids, past_key_values=cache, use_cache=True)
    token, place = ids[:, -1:].clone(), torch.full((1, 1), 9, device=ids.device)
    for _ in range(20):  # until kernels are chosen and the graphs captured
        ours(token, position_ids=place, past_key_values=cache, use_cache=True)
        place += 1
    assert len(stretches_replayed(ours)) == 2
    with waits_noted("error"):
        for _ in range(3):
            ours(token, position_ids=place, past_key_values=cache, use_cache=True)
            place += 1


def test_a_cache_that_stock_has_filled_is_gone_on_with():
    ours, stock = pair_over(2)
    ids, found = prompt(2, 12).cuda(), []
    for first, then in ((stock, stock), (stock, ours), (ours, stock)):
        cache = DynamicCache(config=ours.config)
        first(ids[:, :8], past_key_values=cache, use_cache=True)
        found.append(then(ids[:, 8:], past_key_values=cache, use_cache=True).logits)
        assert [layer.keys.device.index for layer in cache.layers] == [0, 0, 1, 1]
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=1e-4, atol=1e-4)


def test_changed_weights_are_read_and_restore_is_exact():
    ours, stock = pair_over(2)
    ids, mask = on_gpu(*padded((9, 5)))
    for _ in range(3):
        generate(ours, ids, mask)
    for model in (ours, stock):
        for layer in layers(model).values():
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data * 2
    same(generate(ours, ids, mask), generate(stock, ids, mask), EXACT)
    ran_fast(ours)
    before, wanted = snapshot(stock), generate(stock, ids, mask)
    accel.optimize(stock, graphs=True)
    for _ in range(3):
        generate(stock, ids, mask)
    accel.restore(stock)
    assert_same_state(before, snapshot(stock))
    assert all(torch.equal(value, wanted[name]) for name, value in generate(stock, ids, mask).items())


def test_as_transformers_loads_it(tmp_path):
    one = make("llama", num_hidden_layers=4)
    one.save_pretrained(tmp_path)
    where = device_map(one, 2)
    ours, stock = (AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where).eval() for _ in range(2))
    accel.optimize(ours, graphs=True)
    ids, mask = on_gpu(*padded((9, 5)))
    for _ in range(3):
        same(generate(ours, ids, mask), generate(stock, ids, mask), EXACT)
    ran_fast(ours)
    assert len(stretches_replayed(ours)) == 2
