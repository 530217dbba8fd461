"""Graphs of decode steps: really used, never stale, never aliased, given back."""

import copy
import gc
from functools import partial

import pytest
import torch

import accel
from support.llm.calls import unaliased
from support.llm.changes import CHANGES
from support.llm.edits.places import lora
from support.llm.families import FAMILIES, make, padded, prompt
from support.llm.gpu import decode_graphs, new_pair, on_gpu, talk
from support.llm.outputs import generate, same

CORE = [family.name for family in FAMILIES if family.core]

pytestmark = pytest.mark.usefixtures("exact")


def test_one_graph_serves_every_length():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for _ in range(3):
        generate(ours, *on_gpu(*padded((9,))))
    captured = len(decode_graphs(ours))
    assert captured == 1, accel.report(ours)
    for length, new in ((30, 20), (5, 60), (300, 100), (1, 3)):
        ids, mask = on_gpu(*padded((length,)))
        same(generate(ours, ids, mask, max_new_tokens=new), generate(stock, ids, mask, max_new_tokens=new))
    assert len(decode_graphs(ours)) == captured
    assert accel.report(ours).fallbacks == []


@pytest.mark.parametrize("rows, captured", [(65, 1), (130, 1), (512, 1), (513, 0)])
def test_steps_of_many_rows(rows, captured):
    ours, stock = new_pair("llama")
    ids = prompt(rows, 6).cuda()
    for _ in range(2):
        same(generate(ours, ids, None, max_new_tokens=6), generate(stock, ids, None, max_new_tokens=6))
    assert len(decode_graphs(ours)) == captured
    assert accel.report(ours).fallbacks == []


@pytest.mark.parametrize("rows", [70, 200])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_many_rows_are_as_near_to_the_truth_as_stock(name, rows):
    """By whichever of cuBLASLt's algorithms were the fastest: eager, measured, captured, replayed."""
    ours, stock = new_pair(name, torch.bfloat16)
    truth, ids = copy.deepcopy(stock).float(), prompt(rows, 6).cuda()
    wanted = talk(truth, ids)

    def off(found: dict) -> float:
        return max(float((found[key].float() - right).pow(2).mean().sqrt()) for key, right in wanted.items())

    allowed = off(talk(stock, ids))
    for _ in range(4):
        assert off(talk(ours, ids)) <= 2 * allowed + 1e-6
    assert decode_graphs(ours) and accel.report(ours).fallbacks == []


def test_logits_of_many_graphs_are_bounded():
    """Of four numbers of rows, more than a fourth of the memory for graphs; all go on to be right."""
    stock = make("llama", vocab_size=4096).cuda()
    ours = accel.optimize(copy.deepcopy(stock), graphs=True, graph_memory_gb=0.05)
    for _ in range(2):
        for rows in (130, 260, 390, 512):
            ids = prompt(rows, 6).cuda()
            same(generate(ours, ids, None, max_new_tokens=5), generate(stock, ids, None, max_new_tokens=5))
    assert 1 <= len(decode_graphs(ours)) < 4
    assert accel.report(ours).fallbacks == []


def test_ever_new_sizes_keep_memory_flat():
    """A hundred kinds of call; the report tells what graphs take, which stays within what they may."""
    stock = make("llama", max_position_embeddings=2048).cuda()
    ours = accel.optimize(copy.deepcopy(stock), graphs=True, graph_memory_gb=0.04)
    reserved = []
    for number in range(100):
        ids = prompt(1 + number % 25, 3 + 7 * (number % 20) + number, number).cuda()
        for _ in range(2):
            found = generate(ours, ids, None, max_new_tokens=4)
        if number % 10 == 0:
            same(found, generate(stock, ids, None, max_new_tokens=4))
        for row in accel.report(ours).graph_memory:
            assert row["used_mb"] <= row["limit_mb"] == 41.0
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    report = accel.report(ours)
    assert any(row["status"] == "graph" for row in report.graphs)
    assert "of at most 41 MB" in " ".join(str(report).split())
    assert max(reserved[50:]) <= max(reserved[:50]) + 2**23


def test_two_caches_in_turn_through_one_graph():
    """Two conversations of one shape, a step of one and a step of the other."""
    from transformers import DynamicCache

    def talk(model):
        caches, found = [DynamicCache(config=model.config) for _ in range(2)], {}
        for number, cache in enumerate(caches):
            found[f"{number}"] = model(prompt(1, 6 + 9 * number, number).cuda(), past_key_values=cache).logits
        for step in range(10):
            if step == 6:  # the first is dropped; its memory may be given to another
                caches[0] = DynamicCache(config=model.config)
                found["new"] = model(prompt(1, 5, 50).cuda(), past_key_values=caches[0]).logits
            word = prompt(1, 1, step).cuda()
            found[f"then {step}"] = model(word, past_key_values=caches[step % 2]).logits
        return found

    ours, stock = new_pair("llama")
    for _ in range(2):
        same(talk(ours), talk(stock), 4e-5)
    assert decode_graphs(ours)


def test_outputs_are_never_aliased():
    ours, _ = new_pair("llama")
    assert all(unaliased(ours) for _ in range(3)) and decode_graphs(ours)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_changed_model_never_replays_the_old_graph(change):
    if change.only and "llama" not in change.only:
        pytest.skip("not for llama")
    if "dropout" in change.name:
        pytest.skip("drops at random, in stock too: a new adapter is in training mode")
    ours, stock = new_pair("llama")
    for model in (ours, stock):
        model.family = "llama"
    ids, mask = on_gpu(*padded())
    call = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    for _ in range(3):
        generate(ours, ids, mask, **call)
    assert decode_graphs(ours)
    for step in (*change.steps, *filter(None, [change.reverse])):
        ours, stock = (step(model) or model for model in (ours, stock))
        theirs = generate(stock, ids, mask, **call)
        for _ in range(3):
            mine = generate(ours, ids, mask, **call)
            if change.slack == 1:
                same(mine, theirs, 4e-5)
            else:
                error = float((mine["logits.0"] - theirs["logits.0"]).abs().max())
                assert error <= change.slack * 1e-5 * float(theirs["logits.0"].abs().max())


@pytest.mark.parametrize("name", CORE)
def test_restore_is_exact_and_gives_the_memory_back(name, tiny):
    model, stock = (make(name).cuda() for _ in range(2))
    ids, mask = on_gpu(*padded())
    before = tiny.snapshot(model)
    held = []
    for _ in range(2):
        accel.optimize(model, graphs=True)
        for _ in range(3):
            generate(model, ids, mask)
        accel.restore(model)
        tiny.assert_same_state(before, tiny.snapshot(model))
        assert torch.equal(model(ids).logits, stock(ids).logits) and accel.report(model).graphs == []
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1] <= held[0] + 2**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_switched_without_another_capture(dtype):
    ours, stock = new_pair("llama", dtype)
    ids, mask = on_gpu(*padded())
    ids, mask = ids[:1, -6:], mask[:1, -6:]
    call = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}

    def agree(change):
        for model in (ours, stock):
            change(model)
            model.requires_grad_(False).eval()
        theirs = generate(stock, ids, mask, **call)["logits.0"]
        for _ in range(3):
            mine = generate(ours, ids, mask, **call)["logits.0"]
            assert float((mine - theirs).abs().max()) <= (4e-5 if dtype == torch.float32 else 4e-2) * theirs.abs().max()

    def chosen(names):
        return lambda model: [one.set_adapter(names) for one in model.modules() if "lora_A" in one._modules]

    def half(model):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.mul_(0.5)

    agree(lora("style", r=4))
    agree(lambda model: None)
    runner = vars(ours)["forward"].runner
    captured = [entry.graph for entry in runner.entries.values()]
    assert decode_graphs(ours) and any(captured)
    for change in (
        lora("tone", 1, r=8),
        chosen(["tone"]),
        chosen(["style", "tone"]),
        chosen([]),
        chosen(["style"]),
        half,
    ):
        agree(change)
        assert [entry.graph for entry in runner.entries.values()] == captured


def test_rows_have_adapters_of_their_own_in_one_graph():
    from peft.tuners.lora.model import _adapter_names_pre_forward_hook as by_row

    ours, stock = new_pair("llama")
    for model in (ours, stock):
        for number, name in enumerate(("style", "tone")):
            lora(name, number, r=4)(model)
        model.requires_grad_(False).eval()
    ids, mask = on_gpu(*padded())
    call = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    captured = None
    for number in range(4):
        names = [("style", "tone", "__base__")[(row + number) % 3] for row in range(len(ids))]
        hooks = [
            layer.register_forward_pre_hook(partial(by_row, adapter_names=names), with_kwargs=True)
            for model in (ours, stock)
            for layer in model.modules()
            if "lora_A" in layer._modules
        ]
        theirs = generate(stock, ids, mask, **call)
        for _ in range(3 if captured is None else 1):
            same(generate(ours, ids, mask, **call), theirs, 4e-5)
        for hook in hooks:
            hook.remove()
        graphs = [entry.graph for entry in vars(ours)["forward"].runner.entries.values() if entry.graph is not None]
        assert graphs and (captured is None or graphs == captured)
        captured = graphs
