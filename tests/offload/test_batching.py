"""generate_batch of models with `memory=`: each step is a call that weights come to, beside what requests keep."""

import copy
import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from accel.cuda_graphs import adapter_group
from accel.llm.batching import engine, hook, limits
from accel.llm.kv_cache.paged_kv_cache import PagedKVCache
from accel.llm.recording.resting import resting
from accel.offload.blocks import sizes_of
from accel.offload.call_hooks import BlockHook, streamed_model
from accel.offload.layout import CPU
from accel.offload.streamed_model import StreamedModel
from accel.patching.structure import tampered
from support.llm.families import make, prompt

EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64}
ROWS = {  # a model, what is stored of its weights, MB of the budget beside the least
    "streaming": ("llama", {}, None, 0.9),
    "on the card": ("llama", {}, None, 3.5),
    "streaming int4": ("llama", {"intermediate_size": 512, "num_key_value_heads": 1}, "int4-g32", 0.5),
    "hot experts": ("qwen3-moe", EXPERTS, "int4-g32", 0.8),
    "states": ("lfm2", {"num_hidden_layers": 4}, None, 0.3),
}
NEW = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)


@pytest.fixture
def made(streaming, monkeypatch):
    """Gives a model with a budget, its stock, what it holds of weights, and a function of the bytes of keys and values,
    which count as memory of the card.
    """
    pools = weakref.WeakSet()

    class Counted(PagedKVCache):
        def __init__(self, *given):
            super().__init__(*given)
            pools.add(self)

    monkeypatch.setattr(engine, "PagedKVCache", Counted)
    monkeypatch.setattr(limits, "CPU_BYTES", 2**40)
    monkeypatch.setattr(StreamedModel, "_allocated", lambda self: sum(one.bytes for one in pools))

    def build(row):
        kind, sizes, weights, beside = ROWS[row]
        model = make(kind, **{"num_hidden_layers": 8} | sizes)
        stock = copy.deepcopy(model)
        if weights is not None:  # the same numbers
            stock = accel.optimize(stock, weights=weights)
        least = sizes_of(accel.optimize(copy.deepcopy(model), weights=weights)).least()
        accel.optimize(model, weights=weights, memory=least + int(beside * 2**20))
        return model, stock, streamed_model(model), lambda: sum(one.bytes for one in pools)

    return build


@pytest.mark.parametrize("row", ROWS)
@torch.no_grad()
@pytest.mark.turns(2)
def test_answers_are_those_without_a_budget(row, made, monkeypatch):
    model, stock, held, stored = made(row)
    prompts = [prompt(1, length, length)[0].tolist() for length in (19, 1, 33, 7)]
    wanted = [stock.generate(torch.tensor([one]), generation_config=NEW)[0, len(one) :].tolist() for one in prompts]
    seen, placed = [], held._bring
    monkeypatch.setattr(held, "_bring", lambda *given: (placed(*given), seen.append((stored(), held.on_card, *given))))
    trials, trial = [], hook.refusal
    monkeypatch.setattr(hook, "refusal", lambda forward: trials.append(forward) or trial(forward))
    for _ in range(2):
        found = list(model.generate_batch(prompts, generation_config=NEW).values())
        assert [(one.error, one.generated_tokens) for one in found] == [(None, one) for one in wanted]
        assert stored() == 0 and held.due  # what was theirs is for weights
    report = accel.report(model)
    assert report.batching and not report.fallbacks, report
    assert all(pool + on_card <= held.budget.card for pool, on_card, *_ in seen), seen
    assert bool(held.streamed) == (row != "on the card") and bool(held.copies) == (row == "hot experts")
    assert len(trials) == 1 and len(seen) <= 3, seen  # all blocks for a larger step than before, as many as fit again
    model.generate(torch.tensor(prompts[:1]), generation_config=NEW)
    assert not held.due and held.on_card <= held.budget.card


@torch.no_grad()
@pytest.mark.turns(2)
def test_what_comes_to_stream_while_a_model_is_tried_is_told_of_its_calls(made):
    model, _, held, _ = made("on the card")
    for _ in range(2):
        model.generate(torch.tensor([[1]]), generation_config=NEW)
    assert held.streamed == ()
    with resting(model):
        held.bring_back()
        held._bring(tuple(range(len(held.order))), 0)
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        found = [one for module in model.modules() for one in getattr(module, hooks).values()]
        assert sum(type(one) is BlockHook for one in found) == len(held.order)
    assert streamed_model(model.model) is held


@torch.no_grad()
@pytest.mark.turns(2)
def test_prompts_have_adapters_of_their_own(made, monkeypatch):
    """Between calls these are on another device than the weights that stream."""
    model, stock, held, _ = made("streaming")
    prompt_ids = prompt(1, 7, 7)
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)

    def written(one):
        return one.generate(prompt_ids, generation_config=NEW)[0, 7:].tolist()

    wanted = [written(stock)]
    for one in (model, stock):
        torch.manual_seed(1)
        inject_adapter_in_model(config, one)
    wanted.append(written(stock))
    assert written(model) == wanted[1] != wanted[0]
    there = torch.device("cpu", 0)
    monkeypatch.setattr(adapter_group, "device_and_dtype", lambda _: (CPU if held.caller else there, torch.float32))
    for _ in range(2):
        found = model.generate_batch(prompt_ids.tolist() * 2, generation_config=NEW, adapter=[None, "default"])
        assert [(one.error, one.generated_tokens) for one in found.values()] == [(None, one) for one in wanted]
        layer = model.model.layers[held.streamed[0]].mlp.down_proj
        assert "merge" in vars(layer) and tampered(layer) is None  # ours is no other method than stock's


@torch.no_grad()
@pytest.mark.turns(2)
def test_stock_keeps_within_the_budget_too(made, monkeypatch):
    """Where a model cannot be batched; its own share would be of all that is free."""
    model, stock, held, _ = made("streaming")
    given, stock_call = [], type(model).init_continuous_batching
    ours = vars(model)["init_continuous_batching"]
    monkeypatch.setattr(ours, "refused", lambda: "the reason")

    def noted(self, generation_config=None, continuous_batching_config=None, **others):
        given.append(continuous_batching_config)
        return stock_call(self, generation_config, continuous_batching_config, **others)

    monkeypatch.setattr(type(model), "init_continuous_batching", noted)
    asked = ContinuousBatchingConfig(max_memory_percent=0.5)
    for config in (None, asked):
        model.init_continuous_batching(NEW, config)
    room = held.sizes.beside(held.room())
    assert 0 < room < held.budget.card
    for config in given:
        assert config.max_memory_percent == room / 2**40 and config.use_cuda_graph is False
    assert asked.max_memory_percent == 0.5 and asked.use_cuda_graph is None
    assert "generate_batch: the reason" in str(accel.report(model).fallbacks)
    stock.init_continuous_batching(NEW, asked)
    assert given[-1] is asked
