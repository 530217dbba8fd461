"""Graphs of short prompts: one a length they are filled up to, never stale, without waits, in little memory."""

import copy
import gc
import time

import pytest
import torch

import accel
from accel.cuda_graphs.runner import PATIENCE
from accel.llm.generation.prefill import MOST_PROMPT, STEP, bucket_for
from support.kernels.waiting import texts_of, waits_noted
from support.llm.families import make, padded, prompt
from support.llm.gpu import decode_graphs, new_pair, on_gpu, prefill_graphs, talk
from support.llm.miniatures.mambas import MAMBAS
from support.llm.near_ties import clear_seeds
from support.llm.outputs import generate, same

pytestmark = pytest.mark.usefixtures("exact")


def test_one_graph_for_all_lengths_up_to_its_own():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for length in (33, 40, 64, 50, 63):
        ids = prompt(1, length, length).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert len(prefill_graphs(ours)) == 1, accel.report(ours)
    for length in (65, 128, 100):
        ids = prompt(1, length, length).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert len(prefill_graphs(ours)) == 2, accel.report(ours)
    assert accel.report(ours).fallbacks == []


def test_generate_uses_them():
    ours, stock = new_pair("llama", max_position_embeddings=2048)
    for length, call in ((9, {}), (12, {"num_beams": 3}), (300, {"do_sample": True}), (9, {"max_new_tokens": 80})):
        for seed in range(3):
            ids, mask = on_gpu(*padded((length,), seed))
            same(generate(ours, ids, mask, **call), generate(stock, ids, mask, **call))
    rows = {row["inputs"].split(",")[0] for row in prefill_graphs(ours)}
    assert rows == {"1x16", "3x16", "1x320"}, accel.report(ours)


@pytest.mark.parametrize("family", MAMBAS, ids=str)
def test_models_that_take_no_positions(family):
    """Their states are moved by the prompt alone, not by what it is filled up with."""
    ours, stock = new_pair(family)
    for lengths in ((9,), (12,), (300,), (16, 9), (33, 20)):
        for seed in range(3):
            ids, mask = on_gpu(*padded(lengths, seed))
            same(generate(ours, ids, mask), generate(stock, ids, mask))
    rows = {row["inputs"].split(",")[0] for row in prefill_graphs(ours)}
    assert rows == {"1x16", "1x320", "2x16", f"2x{bucket_for(2, 33)}"}, accel.report(ours)
    assert accel.report(ours).fallbacks == []


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2"])
def test_experts_are_in_them_and_in_steps_of_many_rows(name):
    ours, stock = new_pair(name, max_position_embeddings=2048)
    on_cpu = copy.deepcopy(stock).cpu()
    for rows, length in ((1, 12), (1, 300), (40, 9), (96, 5)):
        for seed in clear_seeds(on_cpu, rows, length, 3):
            ids = prompt(rows, length, seed).cuda()
            same(talk(ours, ids), talk(stock, ids), 4e-5)
    read = {row["inputs"].split(",")[0] for row in prefill_graphs(ours)}
    assert read == {f"{rows}x{bucket_for(rows, length)}" for rows, length in ((1, 12), (1, 300), (40, 9), (96, 5))}
    steps = {row["inputs"].split(",")[0] for row in decode_graphs(ours)}
    assert steps == {"1x1", "40x1", "96x1"}, accel.report(ours)
    assert accel.report(ours).fallbacks == []


def test_longer_prompts_and_all_logits_are_read_as_before():
    ours, stock = new_pair("llama", max_position_embeddings=2 * MOST_PROMPT)
    for _ in range(3):
        ids = prompt(1, MOST_PROMPT + 1).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
        same({"all": ours(ids[:, :20]).logits}, {"all": stock(ids[:, :20]).logits}, 4e-5)
    assert prefill_graphs(ours) == []


def test_where_graphs_are_kept_only_if_they_gain():
    """Each length is timed both ways at its second prompt; whatever comes of it, what follows is what stock says."""
    stock = make("llama", max_position_embeddings=MOST_PROMPT).cuda()
    ours = accel.optimize(copy.deepcopy(stock))
    for length in (40, 1500, 2048, 3000, 3000, 1500, 40):
        for seed in range(4):
            ids = prompt(1, length - seed, seed).cuda()
            same(talk(ours, ids), talk(stock, ids), 4e-5)
    assert prefill_graphs(ours), tried(ours)
    for row in tried(ours):
        assert row["status"] == "graph" or "gains nothing" in row["reason"] or "later call" in row["reason"], row


def test_nothing_is_stale():
    """Caches in turn, weights changed in place or exchanged, a model moved away and back; logits stay as given."""
    (ours, stock), kept = new_pair("llama"), []
    for seed in range(10):
        ids = prompt(1, 17 + seed, seed).cuda()
        same(talk(ours, ids), talk(stock, ids), 4e-5)
        logits = ours(ids, logits_to_keep=1).logits
        kept.append((logits, logits.clone()))
        for model in (ours, stock):
            layer = model.model.layers[0]
            if seed == 3:
                layer.mlp.down_proj.weight.mul_(1.5)
            elif seed == 4:
                layer.self_attn.o_proj.weight = torch.nn.Parameter(layer.self_attn.o_proj.weight * 0.5)
            elif seed == 6:
                model.cpu().cuda()
    assert prefill_graphs(ours) and all(torch.equal(*pair) for pair in kept)


def test_hooks_see_the_prompt_as_it_is():
    ours, stock = new_pair("llama")
    seen = []
    for _ in range(3):
        talk(ours, prompt(1, 20).cuda())
    assert prefill_graphs(ours)
    handle = ours.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    for _ in range(3):
        same(talk(ours, prompt(1, 20).cuda(), steps=0), talk(stock, prompt(1, 20).cuda(), steps=0), 4e-5)
    assert seen == [20, 20, 20]
    handle.remove()
    for _ in range(3):
        same(talk(ours, prompt(1, 20).cuda()), talk(stock, prompt(1, 20).cuda()), 4e-5)
    assert prefill_graphs(ours) and len(seen) == 3


def test_two_models_and_their_copies_keep_apart():
    ours, stock = new_pair("llama")
    for _ in range(3):
        talk(ours, prompt(1, 20).cuda())
    twin = copy.deepcopy(ours)
    twin.model.layers[1].mlp.up_proj.weight.mul_(2.0)
    theirs = copy.deepcopy(stock)
    theirs.model.layers[1].mlp.up_proj.weight.mul_(2.0)
    for seed in range(3):
        ids = prompt(1, 18, seed).cuda()
        same(talk(twin, ids), talk(theirs, ids), 4e-5)
        same(talk(ours, ids), talk(stock, ids), 4e-5)


def tried(model) -> list[dict]:
    """Rows of the report for prompts, replayed or not."""
    return [row for row in accel.report(model).graphs if "prompt" in row["inputs"].split(", ")]


def rooms() -> list[int]:
    return sorted({bucket_for(1, new) for new in range(1, MOST_PROMPT + 1)})


def test_no_prompt_stalls_over_its_graph():
    """Neither the first of a length, nor those in which kernels are chosen, more where others use the GPU too, nor the
    one that captures; a steady one takes some milliseconds.
    """
    ours, _ = new_pair("llama", torch.bfloat16, max_position_embeddings=4096)
    for _ in range(3):
        generate(ours, prompt(1, 9).cuda(), None)
    slow = []
    for masked in (False, True):
        for room in rooms():
            for turn in range(PATIENCE + 2):
                ids, mask = prompt(1, room).cuda(), torch.ones(1, room, dtype=torch.long, device="cuda")
                mask[0, 0] = not masked
                torch.cuda.synchronize()
                start = time.perf_counter()
                ours(ids, attention_mask=mask, position_ids=mask.cumsum(1) - mask, logits_to_keep=1)
                torch.cuda.synchronize()
                if time.perf_counter() - start > 0.5:
                    slow.append((room, masked, turn, time.perf_counter() - start))
                if turn > 1 and all(row["status"] == "graph" for row in tried(ours)):
                    break
    assert slow == []
    assert [row for row in tried(ours) if row["status"] != "graph"] == []
    assert len(prefill_graphs(ours)) == 2 * len(rooms())


def test_a_prompt_without_a_mask_never_waits():
    ours, _ = new_pair("llama", torch.bfloat16)
    ids = prompt(1, 20).cuda()
    for _ in range(3):
        ours(ids, logits_to_keep=1)
    with waits_noted() as seen:
        ours(ids, logits_to_keep=1)
        replayed = len(seen)
        ids.sum().item()
    assert len(seen) > replayed, "the debug mode does not tell"
    waits = texts_of(seen[:replayed])
    # The store's addresses are copied to the GPU when it is made, as for any prompt.
    assert len(waits) <= len({shape.device for shape in vars(ours)["forward"].shapes()}), waits


def test_memory_is_flat_and_holds_no_logits_of_the_filling():
    vocabulary = 50_000
    ours, _ = new_pair("llama", torch.bfloat16, vocab_size=vocabulary, max_position_embeddings=MOST_PROMPT)
    for room in rooms():
        for turn in range(PATIENCE + 2):  # where others use the GPU too, choosing kernels takes more calls
            ours(prompt(1, room).cuda(), logits_to_keep=1)
            if turn > 1 and all(row["status"] == "graph" for row in tried(ours)):
                break
    assert len(prefill_graphs(ours)) == len(rooms())
    # The activations of the longest, the libraries' workspace and a row of logits each; all logits were 835 MB.
    assert sum(row["memory_mb"] for row in prefill_graphs(ours)) < 200, accel.report(ours)

    def held():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = held()
    g = torch.Generator().manual_seed(0)
    for seed in range(300):
        ours(prompt(1, int(torch.randint(1, MOST_PROMPT + 1, (), generator=g)), seed).cuda(), logits_to_keep=1)
    after = held()
    assert after[0] <= before[0] + 2**16 and after[1] <= before[1] + 2**25, (before, after)
    assert len(prefill_graphs(ours)) == len(rooms()) <= MOST_PROMPT // STEP + 2
