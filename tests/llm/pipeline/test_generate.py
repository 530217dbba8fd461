"""Texts of a model whose layers are on several devices or processes."""

import copy

import pytest
import torch
from transformers import DynamicCache

import accel
from accel.cuda_graphs.entry import Entry
from accel.llm.generation.loop import handover
from accel.llm.generation.loop.token_loop import TokenLoop
from accel.llm.pipeline.forward import SpreadForward
from accel.llm.pipeline.stretch import ChainedStep, Stretch
from support.llm.calls import counting, followed_by_numbers
from support.llm.families import layers, make, padded, prompt
from support.llm.modes import MODES
from support.llm.outputs import generate, ran_fast, same, write_alike
from support.spread import DEVICES, between_processes, hand_another, pair, spread

FAMILIES = ("gpt2", "gemma3", "gpt-neox", "phi3", "qwen3", "mixtral", "bloom", "falcon-one-key", "cohere2", "smollm3")
STOCK = ("hidden-states", "attentions", "static", "no-cache", "early-exit")  # modes that a fused model leaves to stock


@pytest.fixture
def ran(monkeypatch):
    """[steps in which a stretch computed at once, those in which its layers did]."""
    return counting(monkeypatch, (Stretch, "run", False), (ChainedStep, "passes", False))


def forward_of(model) -> SpreadForward:
    found = vars(model)["forward"]
    assert type(found) is SpreadForward
    return found


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode(both, mode):
    ours, stock = both
    same(mode(ours, *padded(mode.lengths)), mode(stock, *padded(mode.lengths)))
    assert forward_of(ours).chained
    if mode.name not in STOCK and not accel.report(ours).fallbacks:
        ran_fast(ours)


def test_what_steps_compute_at_once(both, ran):
    ours, stock = both
    before = accel.report(ours).fallbacks
    write_alike(ours, stock, (7, 4), max_new_tokens=6)
    assert ran == [5 * 2, 5 * 4]  # the prompt is read layer by layer
    assert accel.report(ours).fallbacks == before


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name):
    ours, stock = pair(name)
    write_alike(ours, stock, (9, 5))
    assert forward_of(ours).chained and len(forward_of(ours).stretches) == 2
    ran_fast(ours)


def test_every_layer_keeps_its_keys_on_its_own_device(both):
    ours, _ = both
    cache = DynamicCache(config=ours.config)
    ours(prompt(2, 5), past_key_values=cache)
    assert [layer.device for layer in cache.layers] == [DEVICES[0]] * 2 + [DEVICES[1]] * 2
    assert set(cache.layers[0].store.blocks.tables) == set(DEVICES)
    assert [str(row[2:]) for row in accel.report(ours).sites if row[1] == "language model"] == [
        "('patched', 'layers 0-1 on cpu, 2-3 on cpu:0; CUDA graphs wait for CUDA; the model is on cpu')"
    ]


def test_the_report_has_the_graphs_of_each_stretch(both, monkeypatch):
    ours, _ = both
    first, second = forward_of(ours).runner.runners
    monkeypatch.setitem(second.entries, (1, "2x1x64"), Entry(memory_mb=3.0))
    assert [(row["path"], row["memory_mb"]) for row in accel.report(ours).graphs] == [(second.path, 3.0)]
    assert second.path == "model.layers.2 to 3 on cpu:0" != first.path


def test_the_loop_that_runs_ahead(both, monkeypatch):
    ours, stock = both
    monkeypatch.setattr(handover, "DEVICES", ("cuda", "cpu"))
    loops = counting(monkeypatch, (TokenLoop, "run", False))
    for call in ({}, {"lengths": (7, 4), "do_sample": True}):
        same(followed_by_numbers(ours, **call), followed_by_numbers(stock, **call))
    assert loops == [2]


def test_where_something_is_done_between_layers_each_computes_by_itself(monkeypatch, ran):
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)))
    hand_another(monkeypatch, ours)
    ran[:] = 0, 0
    write_alike(ours, stock, (7, 4))
    assert not forward_of(ours).chained
    assert ran == [0, 2] and not accel.report(ours).fallbacks


def test_a_copy_is_fused_by_its_own_weights(both):
    ours, stock = both
    copied, changed = copy.deepcopy(ours), copy.deepcopy(stock)
    for model in (copied, changed):
        for layer in layers(model).values():
            layer.mlp.down_proj.weight.mul_(1.5)
    write_alike(copied, changed, (6, 3))
    write_alike(ours, stock, (6, 3))
    assert (
        not accel.report(copied).fallbacks
        and forward_of(copied).stretches[0].layers[0].module is copied.model.layers[0]
    )


def test_keys_and_values_in_eight_bits_are_those_of_one_device():
    stock = make("llama", num_hidden_layers=4)
    ours = accel.optimize(spread(copy.deepcopy(stock)), kv_cache="int8")
    one = accel.optimize(copy.deepcopy(stock), kv_cache="int8")
    got, wanted, exact = (
        generate(model, *padded((9, 5)), output_logits=True, return_dict_in_generate=True)
        for model in (ours, one, stock)
    )
    same(got, wanted)
    assert not torch.equal(wanted["logits.3"], exact["logits.3"])
    cache = DynamicCache(config=ours.config)
    ours(prompt(2, 5), past_key_values=cache)
    assert [shape.kv_dtype for shape in cache.layers[0].store.shapes] == [torch.int8] * 4


REASON = "pp_size=2: each process holds some of the layers, and its calls wait for the others"


def test_two_processes_compute_what_one_does(rank_pool, tmp_path):
    stock = make("llama", num_hidden_layers=4)
    stock.save_pretrained(tmp_path)
    wanted = stock.generate(prompt(2, 6), max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()
    for found in rank_pool(2).run(between_processes, str(tmp_path)):
        assert found["wanted"] == found["got"] == wanted
        assert [tuple(row) for row in found["told"]] == [("", "language model", "skipped", REASON)]
