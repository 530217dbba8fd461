"""Requests of one batch with adapters of their own."""

import copy

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig

import accel
from support.llm.batching.engines import alone, as_alone, engine_of, finished, prompts_of, request
from support.llm.edits.places import choose, lora, switch
from support.llm.families import make
from support.llm.miniatures.family import VOCAB

pytest.importorskip("peft")
CONFIG = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
NEW = GenerationConfig(max_new_tokens=6, eos_token_id=-1, pad_token_id=0)
NAMES = ["style", "tone", None, "style", "tone", None]


@pytest.fixture(scope="module")
def adapted():
    """A model without accel, and a copy with it; adapters are strong enough to change what comes first."""
    stock = make("llama")
    for number, name in enumerate(("style", "tone")):
        lora(name, number, r=4 + number, lora_alpha=64)(stock)
    stock.requires_grad_(False).eval()
    return stock, accel.optimize(copy.deepcopy(stock), cpu="fuse")


def wanted(stock, prompts, names):
    found = []
    for prompt, name in zip(prompts, names, strict=True):
        switch(name is not None)(stock)
        if name is not None:
            choose(name)(stock)
        found.append(alone(stock, prompt, 6))
    switch(True)(stock)
    return found


def given(model, prompts, **more):
    outputs = model.generate_batch(prompts, generation_config=NEW, continuous_batching_config=CONFIG, **more)
    assert not [one.error for one in outputs.values() if one.error]
    return [one.generated_tokens for one in outputs.values()]


def test_each_prompt_has_its_adapter(adapted):
    stock, ours = adapted
    same, others = prompts_of([100], VOCAB), prompts_of([5, 9, 70], VOCAB, seed=1)
    prompts = [*same * 3, *others]  # what begins alike is stored once for each adapter
    answers = wanted(stock, prompts, NAMES)
    assert len(set(map(tuple, answers[:3]))) == 3
    assert given(ours, prompts, adapter=NAMES) == answers
    assert given(ours, prompts, adapter="tone") == wanted(stock, prompts, ["tone"] * 6)
    choose("tone")(ours)
    assert given(ours, prompts) == wanted(stock, prompts, ["tone"] * 6)
    assert not accel.report(ours).fallbacks


@pytest.mark.turns(4)
def test_what_is_stored_is_not_found_once_an_adapter_has_changed(adapted):
    stock, ours = map(copy.deepcopy, adapted)
    [prompt] = prompts_of([100], VOCAB)
    changes = (
        lambda model: None,
        lambda model: [one.scaling.update(style=5.0) for one in model.modules() if hasattr(one, "lora_A")],
        lambda model: [one.mul_(-1.5) for path, one in model.named_parameters() if "lora_B.style" in path],
        lora("third", 7, r=140, lora_alpha=64),
    )
    with ours.continuous_batching_context_manager(generation_config=NEW, continuous_batching_config=CONFIG) as manager:
        for change in changes:
            for model in (stock, ours):
                change(model)
                model.requires_grad_(False).eval()
            names = ["style", "third" if change is changes[-1] else "tone"]
            ids = [manager.add_request(prompt, adapter=name) for name in names]
            told = [manager.get_result(one, timeout=20) for one in ids]
            assert not [one.error for one in told if one.error]
            assert [one.generated_tokens for one in told] == wanted(stock, [prompt] * 2, names)
    engine = engine_of(ours)
    assert engine.add(request("gone", prompt[:9], 90, adapter="third")) == []
    for _ in range(5):
        engine.step()
    for layer in (one for one in ours.modules() if hasattr(one, "lora_A")):
        layer.delete_adapter("third")
    [told] = finished(engine, [request("there", prompt[:9], 90, adapter="tone")])[:1]
    assert told.id == "gone" and told.error == "adapter='third': the model has 'style', 'tone'"


def test_adapters_that_tokens_cannot_have_are_refused_before_anything_starts(adapted):
    stock = copy.deepcopy(adapted[0])
    ours = accel.optimize(copy.deepcopy(stock), cpu="fuse")

    def refused(match, *prompts, **more):
        with pytest.raises((ValueError, TypeError), match=match):
            given(ours, [[3, 4], [5]], **more)

    refused("adapter='tonne': the model has 'style', 'tone'", adapter=["style", "tonne"])
    refused("1 for 2 prompts", adapter=["style"])
    refused("adapter='': the model has", adapter=["style", ""])
    refused("adapter=5: give a name", adapter=5)
    with ours.continuous_batching_context_manager(generation_config=NEW, continuous_batching_config=CONFIG) as manager:
        told = manager.get_result(manager.add_request([3, 4], adapter="tonne"), timeout=20)
        assert told.error == "adapter='tonne': the model has 'style', 'tone'"
        told = manager.get_result(manager.add_request([3, 4], adapter="__base__"), timeout=20)
        assert told.generated_tokens == wanted(stock, [[3, 4]], [None])[0]
    switch(False)(ours)
    refused("adapter='tone': the model's adapters are disabled", adapter=["tone", None])
    assert given(ours, [[3, 4]], adapter=[None]) == wanted(stock, [[3, 4]], [None])
    lora("weights", use_dora=True)(ours)
    refused("not alone products of low rank", adapter="style")


def test_where_a_linear_cannot_tell_tokens_apart_others_go_on():
    stock = make("jamba")
    lora("style", target_modules=["dt_proj"])(stock)
    stock.requires_grad_(False).eval()
    engine = engine_of(accel.optimize(copy.deepcopy(stock), cpu="fuse"))
    prompts = prompts_of([9, 5, 20], VOCAB)
    named = request("named", prompts[0], adapter="style")
    others = [request("first", prompts[1]), request("last", prompts[2])]
    finished(engine, [others[0], named, others[1]])
    assert "computed for all tokens of a step alike" in named.error
    as_alone(stock, others)
